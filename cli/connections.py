"""The connections of one server by who has them, so that one who opens too many loses its own and not others'."""

from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class Connections(Generic[C]):
    """Table of open connections, each *idle* or with a request in progress, by holder.

    A holder is an address, or a tenant once a request of the connection has shown its key. ``most`` may be open at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._idle: dict[str, dict[C, None]] = {}
        self._busy: dict[str, dict[C, None]] = {}
        self._places: dict[C, tuple[dict[str, dict[C, None]], str]] = {}

    @property
    def is_overfull(self) -> bool:
        """True while more are open than may be."""
        return len(self._places) > self.most

    def put(self, connection: C, holder: str, *, is_idle: bool) -> None:
        """Note who has the connection, and whether a request is in progress on it."""
        self.remove(connection)
        table = self._idle if is_idle else self._busy
        table.setdefault(holder, {})[connection] = None
        self._places[connection] = (table, holder)

    def remove(self, connection: C) -> None:
        """Forget the connection."""
        place = self._places.pop(connection, None)
        if place is not None:
            table, holder = place
            del table[holder][connection]
            if not table[holder]:
                del table[holder]

    def surplus(self, newest: C) -> C:
        """Return the connection that has to end so that ``newest`` can stay, or ``newest`` itself. Forget it.

        The one that has been idle for longest goes, of the holder with the most idle ones. If all others are in use, the last
        one goes that the holder with the most has begun to use; and ``newest`` if nobody has more than one.
        """
        _, own = self._places[newest]
        self.remove(newest)
        if self._idle:
            most_idle = max(self._idle.values(), key=len)
            found = next(iter(most_idle))
        else:
            largest = max(self._busy.values(), key=len)
            found = next(reversed(largest)) if len(largest) > 1 else newest
        if found is not newest:
            self.put(newest, own, is_idle=True)
        self.remove(found)
        return found
