"""Headers that tell a client its rate.

``RateLimit-Policy`` and ``RateLimit`` are structured fields of the IETF's draft; OpenAI's clients read ``x-ratelimit-…``.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from math import ceil

from contracts.ledger_records import NewOperation
from store.database import Database
from tenants.rate_lines import line_states
from tenants.rates import Meter, RateState, rate_states, tightest
from tenants.request_rates import WINDOW_SECONDS, RequestCount
from tenants.standing import RateStanding, rate_standing


@dataclass(slots=True)
class _Noted:
    """Rates that the answer to a request tells. One object for all tasks that work on the request."""

    rate: RateStanding | None = None
    requests: RequestCount | None = None


_noted: ContextVar[_Noted | None] = ContextVar("weft_rate", default=None)


def begin_noting() -> None:
    """Note rates of a new request. Call it once, at the edge, in the request's task."""
    _noted.set(_Noted())


def note_rate(meter: Meter, state: RateState | None, now: datetime) -> None:
    """Have the answer to the running task's request tell this rate."""
    if state is not None and (noted := _noted.get()) is not None:
        noted.rate = rate_standing(meter, state, now)


async def note_stored_rate(database: Database, operation: NewOperation, meter: Meter, now: datetime) -> None:
    """Have the answer to the running task's request tell how the tightest of the operation's rates stands in the database."""
    async with database.read() as session:
        states = await rate_states(session, [operation.tenant])
        of_lines = await line_states(session, operation.lines)
    of_tenant = [state for (_, of), state in states.items() if of is meter]
    note_rate(meter, tightest([*of_tenant, *of_lines.values()], now), now)


def note_requests(count: RequestCount) -> None:
    """Have the answer to the running task's request tell this rate of requests."""
    if (noted := _noted.get()) is not None:
        noted.requests = count


@dataclass(frozen=True, slots=True)
class _Policy:
    """A rate as the headers tell it. ``window`` and ``reset`` are in seconds; ``kind`` is OpenAI's word for what is counted."""

    name: str
    kind: str
    quota: int
    window: int
    remaining: int
    reset: int


def _policies(noted: _Noted) -> list[_Policy]:
    found: list[_Policy] = []
    if (rate := noted.rate) is not None:
        window = max(1, ceil(rate.burst * 60 / rate.per_minute))
        found.append(_Policy(f"{rate.meter}-tokens", "tokens", rate.burst, window, rate.remaining, ceil(rate.seconds)))
    if (count := noted.requests) is not None:
        quota = count.rate.per_minute
        found.append(_Policy("requests", "requests", quota, WINDOW_SECONDS, count.remaining, count.reset))
    return found


def noted_headers(path: str, own: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer whose rates were noted. ``own`` are those it has, with ``Retry-After`` of a refusal."""
    noted = _noted.get()
    if noted is None or not (policies := _policies(noted)):
        return []
    told_seconds = next((int(value) for name, value in own if name == b"retry-after"), None)
    if told_seconds is not None:
        # A refusal tells one rate, of tokens if these were looked at: requests are counted first.
        policies = [replace(policies[0], reset=told_seconds)]
    told = {
        "ratelimit-policy": ", ".join(f'"{one.name}";q={one.quota};w={one.window}' for one in policies),
        "ratelimit": ", ".join(f'"{one.name}";r={one.remaining};t={one.reset}' for one in policies),
    }
    if path.startswith("/v1/"):
        for one in policies:
            told[f"x-ratelimit-limit-{one.kind}"] = str(one.quota)
            told[f"x-ratelimit-remaining-{one.kind}"] = str(one.remaining)
            told[f"x-ratelimit-reset-{one.kind}"] = f"{one.reset}s"
    return [(name.encode(), value.encode()) for name, value in told.items()]
