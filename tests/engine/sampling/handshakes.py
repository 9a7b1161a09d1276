"""Handshakes of tests: with the trainer's forward over the world's base."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine.sampling.handshake import Handshake
from engine.sampling.replica import SamplerReplica
from workers.base_forward import BaseForward


@asynccontextmanager
async def handshake(world: Any, folder: Path, *, with_head: bool = True, rank: int = 8) -> AsyncIterator[Handshake]:
    """Yield a handshake with its default tolerance, and close its forward."""
    made = Handshake(
        BaseForward(world.base),
        folder,
        vocabulary_size=world.base.facts.vocabulary_size,
        max_rank=rank,
        with_head=with_head,
    )
    try:
        yield made
    finally:
        await made.close()


async def shake_hands(replica: SamplerReplica, made: Handshake) -> None:
    """Run the handshake."""
    await made.run(replica, await made.prepare())
