"""Tasks that nobody awaits directly, kept alive until they end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """The tasks of one owner. What a task raises is for those who await it, if any."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work``."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, deadline_s: float) -> None:
        """Wait ``deadline_s`` for what runs, then cancel the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Marks it as seen: without a waiter asyncio would report it as lost.
            task.exception()
