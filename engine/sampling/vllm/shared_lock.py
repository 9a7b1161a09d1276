"""A readers-writer lock for asyncio, first come, first served, so that neither kind of holder starves the other."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SharedLock:
    """Lock for the tasks of one event loop, held by many (``shared``) or by one alone (``exclusive``)."""

    def __init__(self) -> None:
        self._holders = 0
        self._is_exclusive = False
        self._queue: deque[tuple[bool, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the lock together with other shared holders."""
        await self._acquire(exclusive=False)
        try:
            yield
        finally:
            self._release()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the lock alone."""
        await self._acquire(exclusive=True)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, *, exclusive: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((exclusive, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._release()
            else:
                # The cancelled request may have been the one that blocked the queue.
                self._admit()
            raise

    def _release(self) -> None:
        self._holders -= 1
        self._is_exclusive = False
        self._admit()

    def _admit(self) -> None:
        while self._queue and not self._is_exclusive:
            exclusive, turn = self._queue[0]
            if turn.cancelled():
                self._queue.popleft()
                continue
            if exclusive and self._holders:
                return
            self._queue.popleft()
            self._holders += 1
            self._is_exclusive = exclusive
            turn.set_result(None)
