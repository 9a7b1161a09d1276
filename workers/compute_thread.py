"""Single thread that owns an engine object: every call that changes the object runs there, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TypeVar

T = TypeVar("T")


class CallClock:
    """Clock of the calls that threads run now: it tells how long the longest of them has been running. For any thread."""

    def __init__(self) -> None:
        self._began: dict[object, float] = {}

    def timed(self, call: Callable[[], T]) -> T:
        """Run ``call`` in this thread and return its result."""
        key = object()
        self._began[key] = monotonic()
        try:
            return call()
        finally:
            del self._began[key]

    def longest(self) -> float:
        """Return the seconds for which the oldest call has been running, 0 while there is none."""
        return monotonic() - min(list(self._began.values()), default=monotonic())


class ComputeThread:
    """A named thread that runs calls one after another. ``clock`` times them, and other calls of the same engine."""

    def __init__(self, name: str) -> None:
        self.clock = CallClock()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` on the thread and return its result. Cancelling the wait does not stop a call that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(self.clock.timed, call))

    def submit(self, call: Callable[[], object]) -> None:
        """Queue ``call`` after the calls given before, without waiting for it. ``call`` must not raise."""
        self._executor.submit(self.clock.timed, call)

    def close(self) -> None:
        """Wait for the call in hand, and drop the calls that have not begun. Blocking."""
        self._executor.shutdown(wait=True, cancel_futures=True)
