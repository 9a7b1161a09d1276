"""Guard of the login: an address, or a key's first part, with many wrong keys in a minute has to wait.

A key that is right is never refused for its first part, which is no secret: strangers could else keep its holder out.
"""

from collections import OrderedDict, deque
from datetime import datetime, timedelta

from starlette.types import Scope

from api.connection_holder import network_of
from contracts.errors import OverRate
from tenants.key_text import KEY_PREFIX, shown_prefix

MOST_WRONG = 10
MOST_BEGUN = 30
"""Sessions that one key begins in a minute."""
_WINDOW = timedelta(minutes=1)
_MOST_NAMES = 10_000
"""Most addresses and prefixes that are remembered; beyond it those that were wrong longest ago are forgotten."""


def address_name(scope: Scope) -> str:
    """Return the name under which tries from the request's address are counted."""
    return f"address {network_of(scope)}"


def names_of(scope: Scope, key: str) -> tuple[str, ...]:
    """Return the names under which a wrong key is counted: its sender's address and, of what looks like a key, its first part."""
    address = address_name(scope)
    return (address, f"key {shown_prefix(key)}") if key.startswith(KEY_PREFIX) else (address,)


class LoginGuard:
    """Wrong logins of the last minute, as one process knows them."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, deque[datetime]] = OrderedDict()

    def check(self, *names: str, now: datetime, most: int = MOST_WRONG) -> None:
        """Raise ``OverRate`` if one of the names was noted ``most`` times in the last minute."""
        for name in names:
            times = self._wrong.get(name)
            while times and times[0] <= now - _WINDOW:
                times.popleft()
            if times and len(times) >= most:
                seconds = max(1, int((times[-most] + _WINDOW - now).total_seconds()) + 1)
                raise OverRate(
                    "too many logins from here or of this key; wait a minute, then try again", seconds=seconds
                )

    def note(self, *names: str, now: datetime) -> None:
        """Note a try."""
        for name in names:
            times = self._wrong.setdefault(name, deque(maxlen=MOST_BEGUN))
            times.append(now)
            self._wrong.move_to_end(name)
        while len(self._wrong) > _MOST_NAMES:
            self._wrong.popitem(last=False)
