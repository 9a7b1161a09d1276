"""Turns of the event loop that a neighbour gets beside something long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Neighbour:
    """Another task of the loop, with the number of its turns so far."""

    turns: int = 0


@asynccontextmanager
async def neighbour() -> AsyncIterator[Neighbour]:
    """Run a neighbour inside the block."""
    found = Neighbour()

    async def take_turns() -> None:
        while True:
            found.turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(take_turns())
    try:
        yield found
    finally:
        task.cancel()
