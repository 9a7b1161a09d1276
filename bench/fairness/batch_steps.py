"""Time of one token of a sequence alone and in a full batch, asked of a replica directly: the batch's own cost, without weft.

A sample beside a full batch gets a token for each of the batch's steps, so this ratio bounds from below what a service on
the same replica can reach.
"""

import asyncio
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.sampling.vllm_server import CONTEXT, MAX_LORAS, MAX_RANK, MAX_RESIDENT
from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel
from engine.sampling.in_process.replica import TorchReplica
from engine.sampling.replica import GenerateRequest, NewToken, SamplerReplica
from engine.sampling.seats import Seats
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.settings import VllmReplicaSettings

_PROMPT = 8
_ALONE_REPEATS = 3
_TOKENS_AT_A_TIME = 8
"""Tokens reported together, as weft asks of a replica."""


@dataclass(frozen=True, slots=True)
class BatchSteps:
    """Median milliseconds of one token of a sequence: alone, and while a batch of ``sequences`` is full."""

    alone_ms: float
    full_ms: float
    sequences: int

    def figures(self) -> dict[str, float]:
        """Return the keys that the benchmark prints."""
        return {
            "step_alone_ms": self.alone_ms,
            "step_in_full_batch_ms": self.full_ms,
            "full_batch_sequences": float(self.sequences),
            "light_to_batch_step": self.full_ms / self.alone_ms,
        }


def in_process_steps(name: str, model: Path, sequences: int, tokens: int) -> BatchSteps:
    """Return the steps of the torch replica, with a batch of ``sequences``. Call this in a fresh process."""

    async def measured() -> BatchSteps:
        replica = TorchReplica(BaseModel.load(read_base_model_facts(name, model, None)), max_sequences=sequences)
        return await _measure(replica, sequences, tokens)

    return asyncio.run(measured())


def vllm_steps(name: str, model: Path, base_url: str, folder: Path, sequences: int, tokens: int) -> BatchSteps:
    """Return the steps of a running vLLM server that works on ``sequences`` at once. Call this in a fresh process."""
    settings = VllmReplicaSettings(
        name="bench",
        base_url=base_url,
        served_model=name,
        base=replace(read_base_model_facts(name, model, None), context_length=CONTEXT),
        zero_adapter=folder / "zero-adapter",
        max_lora_rank=MAX_RANK,
        max_loras=MAX_LORAS,
        max_resident=MAX_RESIDENT,
        head_adapters=True,
        max_streams=sequences,
    )
    # What one tenant may fill of it.
    return asyncio.run(_measure(VllmReplica(settings), Seats.within(sequences).seats, tokens))


async def _measure(replica: SamplerReplica, sequences: int, tokens: int) -> BatchSteps:
    await replica.start()
    try:
        await _step_ms(replica, 0, tokens)
        alone = [await _step_ms(replica, 1 + number, tokens) for number in range(_ALONE_REPEATS)]
        full = await asyncio.gather(*(_step_ms(replica, 100 + number, tokens) for number in range(sequences)))
    finally:
        await replica.close()
    return BatchSteps(statistics.median(alone), statistics.median(full), sequences)


async def _step_ms(replica: SamplerReplica, number: int, tokens: int) -> float:
    """Draw one sequence and return the milliseconds of a token after the first."""
    request = GenerateRequest(
        request_id=f"step-{number}",
        prompt=np.arange(1, 1 + _PROMPT),
        seeds=(number,),
        max_tokens=tokens,
        owner="bench",
        tokens_at_a_time=_TOKENS_AT_A_TIME,
    )
    times = [
        perf_counter() async for events in replica.generate(request) for event in events if isinstance(event, NewToken)
    ]
    return (times[-1] - times[0]) * 1e3 / (len(times) - 1)
