"""Single thread that owns an engine object: every call that changes the object runs there, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """A named thread that runs calls one after another."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` on the thread and return its result. Cancelling the wait does not stop a call that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def submit(self, call: Callable[[], object]) -> None:
        """Queue ``call`` after the calls given before, without waiting for it. ``call`` must not raise."""
        self._executor.submit(call)

    def close(self) -> None:
        """Wait for the call in hand, and drop the calls that have not begun. Blocking."""
        self._executor.shutdown(wait=True, cancel_futures=True)
