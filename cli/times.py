"""Times that commands take as text: spans such as ``90m``, and moments."""

import re
from datetime import UTC, datetime, timedelta

from contracts.errors import InvalidRequest

_SPAN = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def span(text: str, option: str) -> timedelta:
    """Return a span of time such as ``90s``, ``45m``, ``12h`` or ``30d``. Raises ``InvalidRequest`` naming the option."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"{option} takes a time such as 90s, 45m, 12h or 30d; got {text[:50]!r}")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def moment(text: str, option: str, now: datetime) -> datetime:
    """Return a moment: a span from ``now`` on, or a date or time in UTC. Raises ``InvalidRequest`` naming the option."""
    if _SPAN.fullmatch(text):
        return now + span(text, option)
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"{option} takes a time such as 30d, 2027-01-31 or 2027-01-31T12:00; got {text[:50]!r}"
        ) from None
    return given.replace(tzinfo=UTC) if given.tzinfo is None else given
