"""Keeps asyncio tasks alive that their starter does not await, and ends them when their owner closes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """Running tasks of one owner. A task's error is raised only to code that awaits the task; otherwise it is dropped."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start ``work`` as a task, and keep a reference until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, deadline_s: float) -> None:
        """Wait up to ``deadline_s`` seconds for the running tasks, then cancel the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Marks the error as retrieved: asyncio would log an error that no code awaits.
            task.exception()
