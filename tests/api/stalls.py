"""The longest stall of the event loop while something goes on."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic, process_time, thread_time

LONGEST_STALL = 1.0
"""Seconds: ten times what weft promises, for a slow machine. Without its bounds weft stalls for many seconds."""


class Stall:
    """The longest time between two turns of the loop, in seconds.

    A gap counts for no more than the processor time that this process had in it: a busy machine stops the process
    itself for seconds, and that is no fault of the loop.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self.longest_step = 0.0
        """The most processor time in seconds that the loop's own thread had between two turns."""

    async def watch(self) -> None:
        """Take a turn again and again."""
        before, computed, stepped = monotonic(), process_time(), thread_time()
        while True:
            await asyncio.sleep(0.002)
            now, used, own = monotonic(), process_time(), thread_time()
            self.longest = max(self.longest, min(now - before, used - computed))
            self.longest_step = max(self.longest_step, own - stepped)
            before, computed, stepped = now, used, own


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """Keep the collector from the objects of all tests before: walking through them takes it seconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@asynccontextmanager
async def no_stall() -> AsyncIterator[Stall]:
    """Fail if the loop stands still for ``LONGEST_STALL`` or longer."""
    stall = Stall()
    with heap_set_aside():
        watching = asyncio.create_task(stall.watch())
        await asyncio.sleep(0)
        try:
            yield stall
        finally:
            watching.cancel()
    assert stall.longest < LONGEST_STALL, f"the event loop stood still for {stall.longest:.2f} s"
