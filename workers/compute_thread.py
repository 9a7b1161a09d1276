"""The compute thread: every call to one engine object runs on it, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """One named thread that runs calls one after another."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` on the thread and return its result. Cancelling the waiter does not stop a call that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def submit(self, call: Callable[[], object]) -> None:
        """Have ``call`` run after the calls given before, without waiting for it. ``call`` must not fail."""
        self._executor.submit(call)

    def close(self) -> None:
        """Wait for the call in hand and drop the others. Blocking."""
        self._executor.shutdown(wait=True, cancel_futures=True)
