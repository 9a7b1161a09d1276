"""Replicas that the contract suite runs on, each started over the world's base with at most ``SEQUENCES`` sequences."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from engine.sampling.in_process.replica import TorchReplica
from engine.sampling.replica import SamplerReplica

SEQUENCES = 8


@asynccontextmanager
async def torch_replica(world: Any) -> AsyncIterator[SamplerReplica]:
    """Start the in-process replica over the world's base."""
    replica = TorchReplica(world.base, max_sequences=SEQUENCES)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.close()


REPLICAS: dict[str, Callable[[Any], AbstractAsyncContextManager[SamplerReplica]]] = {"torch": torch_replica}
