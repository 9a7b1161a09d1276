"""Places that tenants take in turns, as on the database, so that one tenant's many requests wait for each other, not others.

A request's task carries the tenant who asks (``ask_for``). The service's own work carries none: it is bounded by itself and
all tenants wait for it, so it takes every second turn while it waits.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar

STRANGERS = ""
"""Owner of the places of all requests whose sender is not known."""

Owner = str | None
_Turn = asyncio.Future[None]

OWN_WORK: Owner = None
"""Owner of the places of the service's own work, and of what its operators ask for."""
_asking: ContextVar[Owner] = ContextVar("weft_asking", default=OWN_WORK)


def ask_for(owner: Owner) -> None:
    """Have the running task ask for places in the turns of ``owner``: a tenant, ``STRANGERS`` or ``OWN_WORK``."""
    _asking.set(owner)


def asking() -> Owner:
    """Return who the running task asks for."""
    return _asking.get()


class FairPlaces:
    """``places`` places, at most ``each`` of one tenant at a time, and ``own`` (None: all) of the service's own work.

    Used from one event loop.
    """

    def __init__(self, places: int, *, each: int, own: int | None = None) -> None:
        self._free = places
        self._own = places if own is None else own
        self._each = each
        self._held: Counter[Owner] = Counter()
        self._waiting: dict[Owner, deque[_Turn]] = {}
        """Owners in the order of their turns."""
        self._was_own_work = False

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a place."""
        return sum(map(len, self._waiting.values()))

    def place(self, *, patience: float | None = None) -> AbstractAsyncContextManager[None]:
        """Hold a place for the running task's owner, as ``place_of``."""
        return self.place_of(_asking.get(), patience=patience)

    @asynccontextmanager
    async def place_of(self, owner: Owner, *, patience: float | None = None) -> AsyncIterator[None]:
        """Hold a place for ``owner``. Raises ``TimeoutError`` after ``patience`` seconds; None: never."""
        if self._free and self._has_room(owner):
            self._take(owner)
        else:
            await self._wait(owner, patience)
        try:
            yield
        finally:
            self._give_back(owner)

    async def _wait(self, owner: Owner, patience: float | None) -> None:
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            async with asyncio.timeout(patience):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._give_back(owner)
            else:
                self._forget(owner, turn)
            raise

    def _forget(self, owner: Owner, turn: _Turn) -> None:
        """Take back a turn that nobody waits for any more: it would cost its owner's other tasks their place."""
        turns = self._waiting.get(owner)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]

    def _has_room(self, owner: Owner) -> bool:
        return self._held[owner] < (self._own if owner is OWN_WORK else self._each)

    def _take(self, owner: Owner) -> None:
        self._free -= 1
        self._held[owner] += 1

    def _give_back(self, owner: Owner) -> None:
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        while self._free and (ready := self._ready()):
            self._begin(OWN_WORK if OWN_WORK in ready and not self._was_own_work else ready[0])

    def _ready(self) -> list[Owner]:
        """Return the owners that wait and may have a place, in the order of their turns."""
        return [owner for owner in self._waiting if self._has_room(owner)]

    def _begin(self, owner: Owner) -> None:
        """Give a place to the first of the owner's waiting tasks; the owner's next turn comes after all others'."""
        turns = self._waiting.pop(owner)
        turn = turns.popleft()
        if turns:
            self._waiting[owner] = turns
        if not turn.done():
            self._was_own_work = owner is OWN_WORK
            self._take(owner)
            turn.set_result(None)
