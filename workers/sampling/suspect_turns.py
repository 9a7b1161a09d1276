"""Turns of suspects among the samples of one process, so that no sample is given up for the deaths that another one causes.

A sample at which a process or replica has died is a suspect. Few suspects are drawn at a time, beside ordinary samples. One
that has a single attempt left is drawn while no other suspect is: the next death counts as the last one for it alone.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TOGETHER = 16
"""Most suspects that are drawn together."""


class SuspectTurns:
    """Bound of the suspects that one process draws at a time. Used from one event loop."""

    def __init__(self, most_attempts: int) -> None:
        self._most_attempts = most_attempts
        self._together = 0
        self._has_last = False
        self._waiting_last = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def turn(self, attempts: int) -> AsyncIterator[None]:
        """Wait until a sample with ``attempts`` attempts may be drawn, and hold its turn. An ordinary sample does not wait."""
        if not attempts:
            yield
            return
        is_last = attempts >= self._most_attempts - 1
        await self._enter(is_last=is_last)
        try:
            yield
        finally:
            if is_last:
                self._has_last = False
            else:
                self._together -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _enter(self, *, is_last: bool) -> None:
        async with self._changed:
            if not is_last:
                await self._changed.wait_for(self._has_room)
                self._together += 1
                return
            self._waiting_last += 1
            try:
                await self._changed.wait_for(lambda: not (self._has_last or self._together))
                self._has_last = True
            finally:
                self._waiting_last -= 1
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return not (self._has_last or self._waiting_last) and self._together < _TOGETHER
