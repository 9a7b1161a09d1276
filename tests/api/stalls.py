"""The longest stall of the event loop while something goes on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

LONGEST_STALL = 1.0
"""Seconds: ten times what weft promises, for a slow machine. Without its bounds weft stalls for many seconds."""


class Stall:
    """The longest time between two turns of the loop, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        """Take a turn again and again."""
        before = monotonic()
        while True:
            await asyncio.sleep(0.002)
            now = monotonic()
            self.longest, before = max(self.longest, now - before), now


@asynccontextmanager
async def no_stall() -> AsyncIterator[Stall]:
    """Fail if the loop stands still for ``LONGEST_STALL`` or longer."""
    stall = Stall()
    watching = asyncio.create_task(stall.watch())
    await asyncio.sleep(0)
    try:
        yield stall
    finally:
        watching.cancel()
    assert stall.longest < LONGEST_STALL, f"the event loop stood still for {stall.longest:.2f} s"
