"""Streams of samples without end, which record when each token came and of which version it is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
import orjson

from bench.clients.weft_client import WeftClient, sample_body

Span = tuple[str, int, int]
"""Version, index of the first token, index after the last token."""


class Tokens(msgspec.Struct):
    """Data of a server-sent ``tokens`` event."""

    version: str
    tokens: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Sample:
    """One streamed sample of ``wanted`` tokens. ``done`` is the stream's last event, ``report`` the answer of ``/samples``."""

    prompt: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """Versions, each with the index of its first token."""
    request_id: str = ""
    done: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    failure: str | None = None

    @property
    def is_whole(self) -> bool:
        """True when no token is missing."""
        if self.done is None or self.report is None or self.failure is not None:
            return False
        is_full = len(self.done["sequences"][0]["tokens"]) == self.wanted
        return is_full and bool(self.report["sequences"][0]["stop_reason"] == "length")

    @property
    def spans(self) -> list[Span]:
        """Version spans of the tokens, in the order of arrival."""
        ends = [*(start for _, start in self.changes[1:]), len(self.tokens)]
        return [(version, start, end) for (version, start), end in zip(self.changes, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival of ``tokens`` tokens of ``version`` without a break, from ``at`` on."""

    at: float
    version: str
    tokens: int


class TokenStream:
    """Streams one sample after another from ``sampler``; ``on_version`` is called when its version changes.

    ``gaps`` are (begin, end) between arrivals of a sample's tokens. ``arrivals`` has an entry for each change of version or
    sample.
    """

    def __init__(
        self,
        client: WeftClient,
        sampler: str,
        *,
        number: int,
        vocabulary: int,
        tokens: int,
        on_version: Callable[[], None],
    ) -> None:
        self._client = client
        self._sampler = sampler
        self._number = number
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._on_version = on_version
        self._stopping = False
        self.samples: list[Sample] = []
        self.gaps: list[tuple[float, float]] = []
        self.arrivals: list[Arrival] = []
        self.shown: str | None = None
        self.shown_at = 0.0
        self._count = 0

    def stop(self) -> None:
        """Have ``run`` end after the present sample."""
        self._stopping = True

    async def run(self) -> None:
        """Stream samples until ``stop``."""
        while not self._stopping:
            sample = Sample(self._prompt(len(self.samples)), self._tokens)
            self.samples.append(sample)
            try:
                await self._sample(sample)
            except (RuntimeError, aiohttp.ClientError, OSError) as error:
                sample.failure = str(error) or type(error).__name__
            if sample.failure is not None:
                # A service that fails at once must not be asked without end.
                await asyncio.sleep(0.1)

    def _prompt(self, number: int) -> list[int]:
        return [(self._number * 7 + number * 31 + place * 13) % self._vocabulary for place in range(8)]

    async def _sample(self, sample: Sample) -> None:
        body = sample_body(
            self._sampler,
            self._number * 100_000 + len(self.samples),
            sample.prompt,
            max_tokens=self._tokens,
            seed=self._number * 1000 + len(self.samples),
        )
        last: float | None = None
        async with self._client.stream("stream_sample", body) as answer:
            async for name, data in server_sent_events(answer):
                if name == b"tokens":
                    now = perf_counter()
                    self._take(sample, msgspec.json.decode(data, type=Tokens), now)
                    if last is not None:
                        self.gaps.append((last, now))
                    last = now
                elif name == b"accepted":
                    sample.request_id = orjson.loads(data)["request_id"]
                elif name == b"done":
                    sample.done = orjson.loads(data)
                else:
                    sample.failure = data.decode()
        self._note()
        sample.report = await self._client.get(f"samples/{sample.request_id}")

    def _take(self, sample: Sample, event: Tokens, now: float) -> None:
        is_new = not sample.changes or sample.changes[-1][0] != event.version
        if is_new:
            self._note()
            sample.changes.append((event.version, len(sample.tokens)))
            self.shown_at = now
        sample.tokens += event.tokens
        sample.logprobs += event.logprobs
        self._count += len(event.tokens)
        if is_new:
            self.shown = event.version
            self._on_version()

    def _note(self) -> None:
        """Record the tokens since the last change as an arrival."""
        if self._count and self.shown is not None:
            self.arrivals.append(Arrival(self.shown_at, self.shown, self._count))
        self._count = 0


async def server_sent_events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[bytes, bytes]]:
    """Yield name and data of each server-sent event. weft writes data on one line."""
    rest = b""
    async for data in answer.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"event: "):
                name, _, line = event.partition(b"\n")
                yield name[7:], line[6:]
