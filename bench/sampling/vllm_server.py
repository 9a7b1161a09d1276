"""Rates of samples through weft, beside the same samples asked of weft's vLLM server directly."""

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.clients.weft_client import WeftClient
from bench.processes.cpu import cpu_seconds, group_cpu_seconds, pin, pin_group
from bench.sampling.contestants import (
    Adapters,
    Contestant,
    StraightToVllm,
    ThroughSdk,
    asks,
    keeping_session,
    serving,
    turn,
)
from contracts.base_model import BaseModelFacts
from engine.sampling.vllm.command import find_server_command
from engine.sampling.vllm.http import request_url
from engine.sampling.vllm.model_memory import ModelMemory
from engine.sampling.vllm.process import VllmProcess, VllmProcessSettings, has_accelerator
from engine.sampling.vllm.server_memory import MemoryNeed

ADAPTERS = 4
_LENGTHS = (32, 96, 48, 80, 64)
"""Tokens of samples in turn, 64 in the mean. Samples of one length would all begin and end at the same time."""
_WARM_UP_LENGTHS = (16,)
CONTEXT, MAX_RANK, MAX_LORAS, MAX_RESIDENT = 1024, 32, 8, 64
_MOST_LOGPROBS = 101
SERVICE_ENVIRONMENT = {
    "WEFT_VLLM_CONTEXT_LENGTH": str(CONTEXT),
    "WEFT_VLLM_MAX_LORAS": str(MAX_LORAS),
    "WEFT_BASE_DTYPE": "float32",
    "WEFT_MAX_RANK": str(MAX_RANK),
}
_WEFT, _WHOLE, _STREAMED, _SDK = "weft", "whole", "streamed", "sdk"

Row = dict[str, float]


def server_settings(model: Path, facts: BaseModelFacts, log: Path, *, max_sequences: int = 256) -> VllmProcessSettings:
    """Return the settings of a server as weft would start it."""
    return VllmProcessSettings(
        command=find_server_command(),
        model=model,
        served_model=facts.name,
        log=log,
        context_length=CONTEXT,
        max_lora_rank=MAX_RANK,
        max_loras=MAX_LORAS,
        max_cpu_loras=MAX_RESIDENT + 1,
        max_sequences=max_sequences,
        on_cpu=not has_accelerator(),
        head_adapters=True,
        dtype="float32",
        need=MemoryNeed(
            model=ModelMemory.read(model, dtype="float32", max_rank=MAX_RANK, adapters=MAX_LORAS),
            context_length=CONTEXT,
            sequences=max_sequences,
        ),
        max_logprobs=_MOST_LOGPROBS,
    )


@dataclass(frozen=True, slots=True)
class Arena:
    """Contestants, and the processes whose processor time counts."""

    contestants: dict[str, Contestant]
    sdk: ThroughSdk
    weft_pid: int
    vllm_group: int
    vocabulary: int


@asynccontextmanager
async def arena(folder: Path, facts: BaseModelFacts, data: Path, key: str, *, apart: bool) -> AsyncIterator[Arena]:
    """Run a server, a weft that samples on it, and clients of both, with adapters loaded. ``apart``: the server has core 0."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            VllmProcess(server_settings(facts.path, facts, folder / "logs" / "vllm.log"))
        )
        environment = SERVICE_ENVIRONMENT | {"WEFT_VLLM_URLS": json.dumps([server.base_url])}
        service = await stack.enter_async_context(serving(data, facts, environment))
        client = await stack.enter_async_context(WeftClient(service.base_url, key))
        http = await stack.enter_async_context(keeping_session(server.base_url))
        vocabulary = facts.vocabulary_size
        made = await Adapters.make(client, base_model=facts.name, vocabulary=vocabulary, number=ADAPTERS)
        contestants: dict[str, Contestant] = {_WEFT: made.weft}
        for name in (_WHOLE, _STREAMED):
            contestants[name] = StraightToVllm(
                http, request_url(server.base_url), made.versions, vocabulary=vocabulary, is_streamed=name == _STREAMED
            )
        sdk = await asyncio.to_thread(ThroughSdk, service.base_url, key, made.paths)
        if apart:
            others = set(range(os.cpu_count() or 1)) - {0}
            pin_group(server.group, {0})
            pin(service.pid, others)
            pin(os.getpid(), others)
        yield Arena(contestants, sdk, service.pid, server.group, vocabulary)
        await asyncio.to_thread(sdk.close)


class Measured:
    """Measurements of each contestant's turns: tokens a second, and CPU seconds of weft and of vLLM for a thousand tokens."""

    def __init__(self, place: Arena, concurrent: int, samples: int) -> None:
        self._place = place
        self._concurrent = concurrent
        self._samples = samples
        self._rates: dict[str, list[float]] = {}
        self._cpu: dict[str, list[tuple[float, float]]] = {}

    async def warm_up(self, contestant: Contestant) -> None:
        """Run a short turn that does not count."""
        vocabulary = self._place.vocabulary
        wanted = asks(self._concurrent, lengths=_WARM_UP_LENGTHS, adapters=ADAPTERS, vocabulary=vocabulary, seed=0)
        await turn(contestant, wanted, self._concurrent)

    async def turn(self, name: str, contestant: Contestant, seed: int) -> None:
        """Run one turn of ``name``. Turns with the same ``seed`` have the same samples."""
        place = self._place
        wanted = asks(self._samples, lengths=_LENGTHS, adapters=ADAPTERS, vocabulary=place.vocabulary, seed=seed)
        thousands = sum(ask.tokens for ask in wanted) / 1e3
        weft, vllm = cpu_seconds(place.weft_pid), group_cpu_seconds(place.vllm_group)
        self._rates.setdefault(name, []).append(await turn(contestant, wanted, self._concurrent))
        weft, vllm = cpu_seconds(place.weft_pid) - weft, group_cpu_seconds(place.vllm_group) - vllm
        self._cpu.setdefault(name, []).append((weft / thousands, vllm / thousands))

    def row(self) -> Row:
        """Return medians over rounds. Ratios are medians of the ratios within rounds.

        ``router_ratio`` is the smaller of the two medians. Taking the smaller ratio within each round would favour luck.
        """
        row: Row = {"concurrent": self._concurrent}
        for name, rates in self._rates.items():
            row[f"{name}_tokens_per_s"] = statistics.median(rates)
            row[f"{name}_weft_cpu_s_per_1000"] = statistics.median(weft for weft, _ in self._cpu[name])
            row[f"{name}_vllm_cpu_s_per_1000"] = statistics.median(vllm for _, vllm in self._cpu[name])
        for name in (_WHOLE, _STREAMED):
            pairs = zip(self._rates[_WEFT], self._rates[name], strict=True)
            row[f"ratio_to_{name}"] = statistics.median(weft / straight for weft, straight in pairs)
        row["router_ratio"] = min(row["ratio_to_whole"], row["ratio_to_streamed"])
        return row


async def measure_vllm(
    folder: Path, facts: BaseModelFacts, data: Path, key: str, options: argparse.Namespace
) -> list[Row]:
    """Measure a row for each number of concurrent samples."""
    rows = []
    async with arena(folder, facts, data, key, apart=options.apart) as place:
        for concurrent in map(int, options.concurrent.split(",")):
            measured = Measured(place, concurrent, max(4, options.samples_each * concurrent))
            chosen = list(place.contestants.items())
            if concurrent == options.sdk_concurrent:
                chosen.append((_SDK, place.sdk))
            for _, contestant in chosen:
                await measured.warm_up(contestant)
            for number in range(options.rounds):
                # Each round reverses the order of the round before.
                for name, contestant in chosen if number % 2 == 0 else reversed(chosen):
                    await measured.turn(name, contestant, seed=number + 1)
            rows.append(measured.row())
            show(rows[-1])
    return rows


def show(row: Row) -> None:
    """Print a line for each figure."""
    print("\n".join(f"{name:34} {value:10.3f}" for name, value in row.items()) + "\n", flush=True)
