"""Fairness of samples: a light tenant's beside thousands of long ones of another, and equal tenants' tokens.

Tokens of the flood are counted at the sampler, as they are drawn (``weft_drawn_tokens_total``), over stated windows. The
light tenant draws alone, then beside the flood in turns with the flood alone, so that a drift of the machine hits both.
"""

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from bench.clients.weft_client import WeftClient, sample_body
from bench.fairness.rates import jain_index
from bench.swap.token_streams import server_sent_events

FLOOD_SAMPLES = 4096
EQUAL_TENANTS = 8
LONG_TOKENS = 256
_LIGHT_TOKENS = 16
_PROMPT = tuple(range(1, 9))
_POLLS = 16
"""Samples of the flood that are waited for at a time: a tenant's requests in progress are bounded."""
_SENDS = 32
"""Samples of the flood that are sent at a time."""
_EQUAL_SEQUENCES, _EQUAL_TOKENS = 64, 1000
_TURNS = 4
"""Times that the flood draws alone and beside the light tenant."""
_WARM_UP_SECONDS = 5.0
_SETTLE_SECONDS = 1.0
"""Seconds after each change of the load that are not counted."""
_COUNTER = "weft_drawn_tokens_total{"


@dataclass(frozen=True, slots=True)
class Place:
    """A running service, the address of its metrics, and its tenants' keys."""

    base_url: str
    metrics_url: str
    base_model: str
    light: str
    flood: str
    equals: Sequence[str]


class _Tokens(msgspec.Struct):
    """Data of a stream's event of new tokens."""

    tokens: list[int]


class _Tenant:
    """A tenant with a sampler of the bare base."""

    def __init__(self, client: WeftClient, sampler: str) -> None:
        self._client = client
        self._sampler = sampler
        self._sent = 0
        self.tokens = 0
        """Tokens that ``follow`` has seen."""

    @classmethod
    async def make(cls, stack: AsyncExitStack, place: Place, key: str) -> "_Tenant":
        """Return a tenant with a session of its own."""
        client = await stack.enter_async_context(WeftClient(place.base_url, key))
        session = await client.post("create_session", sdk_version="bench")
        made = await client.post(
            "create_sampling_session",
            session_id=session["session_id"],
            sampling_session_seq_id=0,
            base_model=place.base_model,
        )
        return cls(client, made["sampling_session_id"])

    async def send(self, max_tokens: int) -> dict[str, Any]:
        """Send one sample and return its promise."""
        return await self._client.post("asample", **self._body(max_tokens))

    async def wait_for(self, promises: Iterator[dict[str, Any]]) -> None:
        """Wait for the samples, one after another. Several may do so for one iterator."""
        for promise in promises:
            await self._client.result(promise)

    async def sample_until(self, end: float, max_tokens: int) -> list[float]:
        """Draw one sample after another until time ``end``, at least one; return the seconds that each took."""
        found: list[float] = []
        while not found or perf_counter() < end:
            started = perf_counter()
            await self._client.result(await self.send(max_tokens))
            found.append(perf_counter() - started)
        return found

    async def follow(self) -> None:
        """Draw many long sequences as one sample, and count their tokens as they come."""
        body = self._body(_EQUAL_TOKENS) | {"num_samples": _EQUAL_SEQUENCES}
        async with self._client.stream("stream_sample", body) as answer:
            async for name, data in server_sent_events(answer):
                if name == b"tokens":
                    self.tokens += len(msgspec.json.decode(data, type=_Tokens).tokens)
                elif name == b"error":
                    raise RuntimeError(f"a followed sample failed: {data.decode()}")

    def _body(self, max_tokens: int) -> dict[str, Any]:
        self._sent += 1
        return sample_body(self._sampler, self._sent, _PROMPT, max_tokens=max_tokens, seed=self._sent)


class _Counter:
    """Tokens that the service has drawn so far."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def read(self) -> tuple[float, float]:
        """Return the time and the tokens of all tenants."""
        async with self._http.get(self._url) as answer:
            lines = (await answer.text()).splitlines()
        return perf_counter(), sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_COUNTER))


def measure_samples(place: Place, *, seconds: float) -> dict[str, float]:
    """Return the light tenant's latencies, the flood's rates and the equal tenants' index. A phase takes ``seconds``."""
    return asyncio.run(_measure(place, seconds))


async def _measure(place: Place, seconds: float) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        counter = _Counter(await stack.enter_async_context(aiohttp.ClientSession()), place.metrics_url)
        equals = [await _Tenant.make(stack, place, key) for key in place.equals]
        rates = await _equal_rates(equals, seconds)
        light, flood = [await _Tenant.make(stack, place, key) for key in (place.light, place.flood)]
        await light.sample_until(perf_counter() + _WARM_UP_SECONDS, _LIGHT_TOKENS)
        alone = await light.sample_until(perf_counter() + seconds, _LIGHT_TOKENS)
        beside: list[float] = []
        lonely: list[float] = []
        shared: list[float] = []
        async with _flooded(flood):
            await asyncio.sleep(_WARM_UP_SECONDS)
            for _ in range(_TURNS):
                lonely.append(await _rate_alone(counter, seconds / _TURNS))
                rate, took = await _rate_beside(counter, light, seconds / _TURNS)
                shared.append(rate)
                beside += took
    ratios = [one / other for one, other in zip(shared, lonely, strict=True)]
    for number, row in enumerate(zip(lonely, shared, ratios, strict=True), start=1):
        print(f"turn {number}: flood alone {row[0]:8.1f} tokens/s, beside {row[1]:8.1f}, ratio {row[2]:.2f}")
    return {
        "sample_light_alone_p50_ms": statistics.median(alone) * 1e3,
        "sample_light_with_flood_p50_ms": statistics.median(beside) * 1e3,
        "sample_light_p50_ratio": statistics.median(beside) / statistics.median(alone),
        "sample_flood_alone_tokens_per_s": statistics.median(lonely),
        "sample_flood_with_light_tokens_per_s": statistics.median(shared),
        "sample_flood_tokens_per_s_ratio": statistics.median(ratios),
        "sample_equal_tokens_per_s": sum(rates),
        "sample_jain_index": jain_index(rates),
    }


async def _rate_alone(counter: _Counter, seconds: float) -> float:
    """Return the flood's tokens a second over ``seconds``."""
    await asyncio.sleep(_SETTLE_SECONDS)
    begin, before = await counter.read()
    await asyncio.sleep(seconds)
    end, after = await counter.read()
    if after == before:
        raise RuntimeError("the flood has ended: ask for fewer seconds")
    return (after - before) / (end - begin)


async def _rate_beside(counter: _Counter, light: _Tenant, seconds: float) -> tuple[float, list[float]]:
    """Return the flood's tokens a second while the light tenant draws for ``seconds``, and what its samples took."""
    await light.sample_until(perf_counter() + _SETTLE_SECONDS, _LIGHT_TOKENS)
    begin, before = await counter.read()
    took = await light.sample_until(perf_counter() + seconds, _LIGHT_TOKENS)
    end, after = await counter.read()
    return (after - before - len(took) * _LIGHT_TOKENS) / (end - begin), took


@asynccontextmanager
async def _flooded(flood: _Tenant) -> AsyncIterator[None]:
    """Have the flood's samples pending inside the block, some of them waited for."""
    sent: list[dict[str, Any]] = []
    while len(sent) < FLOOD_SAMPLES:
        sent += await asyncio.gather(*(flood.send(LONG_TOKENS) for _ in range(_SENDS)))
    promises = iter(sent)
    drawing = [asyncio.create_task(flood.wait_for(promises)) for _ in range(_POLLS)]
    try:
        yield
    finally:
        for task in drawing:
            task.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)


async def _equal_rates(tenants: Sequence[_Tenant], seconds: float) -> list[float]:
    """Return the tokens a second of equal tenants that all have more to draw than there is room for."""
    following = [asyncio.create_task(tenant.follow()) for tenant in tenants]
    try:
        await asyncio.sleep(_WARM_UP_SECONDS)
        before = [tenant.tokens for tenant in tenants]
        await asyncio.sleep(seconds)
        if ended := [task for task in following if task.done()]:
            ended[0].result()
            raise RuntimeError("a tenant has nothing to draw any more: ask for fewer seconds")
        return [(tenant.tokens - had) / seconds for tenant, had in zip(tenants, before, strict=True)]
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
