"""Rates of the torch replica, which weft uses without vLLM: by itself, and through a service."""

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path

from bench.clients.weft_client import WeftClient
from bench.sampling.contestants import Adapters, Contestant, StraightToTorch, asks, serving, turn
from contracts.base_model import BaseModelFacts
from engine.model.base import BaseModel
from engine.sampling.in_process.replica import TorchReplica
from tenants.checkpoints import CHECKPOINTS

_ADAPTERS, _SAMPLES, _TOKENS = 4, 16, 64
_WARM_UP_ROUNDS = 1


def measure_torch(facts: BaseModelFacts, data: Path, key: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure, in turns, tokens a second of 16 samples over 4 adapters at once, and of one sample at a time."""
    return asyncio.run(_measure(facts, data, key, options.rounds))


async def _measure(facts: BaseModelFacts, data: Path, key: str, rounds: int) -> dict[str, float]:
    base = BaseModel.load(facts, dtype="float32", device="cpu")
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(data, facts, {"WEFT_BASE_DTYPE": "float32"}))
        client = await stack.enter_async_context(WeftClient(service.base_url, key))
        vocabulary = facts.vocabulary_size
        made = await Adapters.make(client, base_model=facts.name, vocabulary=vocabulary, number=_ADAPTERS)
        replica = TorchReplica(base)
        await replica.start()
        stack.push_async_callback(replica.close)
        directories = [data / CHECKPOINTS / version for version in made.versions]
        contestants: dict[str, Contestant] = {
            "engine": StraightToTorch(replica, directories),
            "service": made.weft,
        }
        found: dict[tuple[str, int], list[float]] = {}
        for number in range(_WARM_UP_ROUNDS + rounds):
            for name, concurrent in product(contestants, (1, _SAMPLES)):
                samples = max(_ADAPTERS, concurrent)
                wanted = asks(samples, lengths=(_TOKENS,), adapters=_ADAPTERS, vocabulary=vocabulary, seed=number)
                rate = await turn(contestants[name], wanted, concurrent)
                if number >= _WARM_UP_ROUNDS:
                    found.setdefault((name, concurrent), []).append(rate)
    figures = {}
    for name in contestants:
        one, many = found[name, 1], found[name, _SAMPLES]
        figures[f"torch_{name}_tokens_per_s"] = statistics.median(many)
        figures[f"torch_{name}_one_tokens_per_s"] = statistics.median(one)
        figures[f"torch_{name}_16_to_1"] = statistics.median(b / a for a, b in zip(one, many, strict=True))
    return figures
