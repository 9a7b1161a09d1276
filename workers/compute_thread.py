"""One thread that owns an engine object: everything that touches it goes through here, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """A single named thread; calls run one after another."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` on the thread; a cancelled waiter does not stop a call that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def submit(self, call: Callable[[], object]) -> None:
        """Have ``call``, which must not fail, run after what was given before; nobody waits for it."""
        self._executor.submit(call)

    def close(self) -> None:
        """Let the call in hand end, drop the rest."""
        self._executor.shutdown(wait=True, cancel_futures=True)
