"""Latency of a light tenant's samples beside thousands of long ones of another, and what the flood loses by it."""

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

from bench.clients.weft_client import WeftClient, sample_body

FLOOD_SAMPLES = 4096
_LIGHT_TOKENS, _LONG_TOKENS = 16, 256
_PROMPT = tuple(range(1, 9))
_POLLS = 16
"""Samples of the flood that are waited for at a time: a tenant's requests in progress are bounded."""
_FIRST_SECONDS = 2.0
"""Seconds that the flood draws before the light tenant begins."""


class _Tenant:
    """A tenant with a sampler of the bare base."""

    def __init__(self, client: WeftClient, sampler: str) -> None:
        self._client = client
        self._sampler = sampler
        self._sent = 0
        self.ended: list[float] = []
        """Time at which each sample ended."""

    @classmethod
    async def make(cls, stack: AsyncExitStack, base_url: str, key: str, base_model: str) -> "_Tenant":
        """Return a tenant with a session of its own."""
        client = await stack.enter_async_context(WeftClient(base_url, key))
        session = await client.post("create_session", sdk_version="bench")
        made = await client.post(
            "create_sampling_session",
            session_id=session["session_id"],
            sampling_session_seq_id=0,
            base_model=base_model,
        )
        return cls(client, made["sampling_session_id"])

    async def send(self, max_tokens: int) -> dict[str, Any]:
        """Send one sample and return its promise."""
        self._sent += 1
        body = sample_body(self._sampler, self._sent, _PROMPT, max_tokens=max_tokens, seed=self._sent)
        return await self._client.post("asample", **body)

    async def wait_for(self, promises: Iterator[dict[str, Any]]) -> None:
        """Wait for the samples, one after another. Several may do so for one iterator."""
        for promise in promises:
            await self._client.result(promise)
            self.ended.append(perf_counter())

    async def sample(self, max_tokens: int) -> float:
        """Draw one sample and return the seconds that it took."""
        started = perf_counter()
        await self._client.result(await self.send(max_tokens))
        return perf_counter() - started

    async def sample_for(self, seconds: float, max_tokens: int) -> list[float]:
        """Draw one sample after another for ``seconds``; return the seconds that each took."""
        end = perf_counter() + seconds
        found = []
        while perf_counter() < end:
            found.append(await self.sample(max_tokens))
        return found


def measure_samples(base_url: str, keys: Sequence[str], base_model: str, *, seconds: float) -> dict[str, float]:
    """Return the light tenant's latencies and the flood's rates; ``keys`` are of the light tenant and of the flood."""
    return asyncio.run(_measure(base_url, keys, base_model, seconds))


async def _measure(base_url: str, keys: Sequence[str], base_model: str, seconds: float) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        light, flood = [await _Tenant.make(stack, base_url, key, base_model) for key in keys]
        await light.sample(_LIGHT_TOKENS)
        alone = await light.sample_for(seconds, _LIGHT_TOKENS)
        promises = iter([await flood.send(_LONG_TOKENS) for _ in range(FLOOD_SAMPLES)])
        drawing = [asyncio.create_task(flood.wait_for(promises)) for _ in range(_POLLS)]
        try:
            await asyncio.sleep(_FIRST_SECONDS)
            before = await _rate(flood, seconds)
            beside_from = perf_counter()
            beside = await light.sample_for(seconds, _LIGHT_TOKENS)
            beside_to = perf_counter()
            after = await _rate(flood, seconds)
        finally:
            for task in drawing:
                task.cancel()
            await asyncio.gather(*drawing, return_exceptions=True)
    shared = _tokens(flood, beside_from, beside_to) / (beside_to - beside_from)
    lonely = statistics.mean((before, after))
    return {
        "sample_light_alone_p50_ms": statistics.median(alone) * 1e3,
        "sample_light_with_flood_p50_ms": statistics.median(beside) * 1e3,
        "sample_light_p50_ratio": statistics.median(beside) / statistics.median(alone),
        "sample_flood_alone_tokens_per_s": lonely,
        "sample_flood_with_light_tokens_per_s": shared,
        "sample_flood_tokens_per_s_ratio": shared / lonely if lonely else 0.0,
    }


async def _rate(flood: _Tenant, seconds: float) -> float:
    """Return the flood's tokens a second over the next ``seconds``."""
    begin = perf_counter()
    await asyncio.sleep(seconds)
    end = perf_counter()
    return _tokens(flood, begin, end) / (end - begin)


def _tokens(flood: _Tenant, begin: float, end: float) -> int:
    return _LONG_TOKENS * sum(begin <= ended <= end for ended in flood.ended)
