"""Test client of a replica: sends requests, collects their events, and checks the order that the protocol promises."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, Self

import numpy as np

from contracts.operations import TopkLogprobs
from engine.sampling.replica import (
    AdapterVersion,
    Ended,
    EndReason,
    GenerateEvent,
    GenerateRequest,
    NewToken,
    PromptCached,
    PromptScored,
    PromptScoring,
    SamplerReplica,
)

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Draw:
    """Fields of a request that tests vary."""

    max_tokens: int = 24
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    seeds: tuple[int | None, ...] = (None,)
    tokens_at_a_time: int = 1
    owner: str = ""


GREEDY = Draw(temperature=0)
RANDOM = Draw(seeds=(11,))


@dataclass
class DrawnSequence:
    """One sequence so far."""

    ids: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    rows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    reason: EndReason | None = None

    @property
    def logprobs(self) -> np.ndarray:
        """Float32 (T,)."""
        return np.array(self.scores, np.float32)

    @property
    def topk(self) -> TopkLogprobs | None:
        """(T, k); None when there are no rows."""
        if not self.rows:
            return None
        ids, logprobs = zip(*self.rows, strict=True)
        return TopkLogprobs(np.stack(ids), np.stack(logprobs))


@dataclass
class Drawn:
    """All events of a request so far."""

    sequences: list[DrawnSequence]
    scored: PromptScored | None = None
    counts: list[int] = field(default_factory=list)
    """Counts of prompt tokens from the cache."""

    @property
    def cached(self) -> int:
        """Least of the counts, 0 without any."""
        return min(self.counts, default=0)

    @classmethod
    def of(cls, request: GenerateRequest) -> Self:
        """Return an empty result for ``request``."""
        return cls([DrawnSequence() for _ in request.seeds])

    @property
    def only(self) -> DrawnSequence:
        """The sequence of a request for one."""
        (sequence,) = self.sequences
        return sequence

    def take(self, events: Sequence[GenerateEvent]) -> None:
        """Add ``events``, which must keep the order that the protocol promises."""
        assert events
        for event in events:
            if isinstance(event, PromptScored):
                assert self.scored is None
                assert not any(sequence.ids or sequence.reason for sequence in self.sequences)
                self.scored = event
                continue
            if isinstance(event, PromptCached):
                self.counts.append(event.tokens)
                continue
            sequence = self.sequences[event.index]
            assert sequence.reason is None
            if isinstance(event, Ended):
                sequence.reason = event.reason
                continue
            sequence.ids.append(event.token)
            sequence.scores.append(event.logprob)
            if event.topk is not None:
                sequence.rows.append(event.topk)


class Running:
    """A request that is being read, so that a test can look at it and wait for what it has."""

    def __init__(self, replica: SamplerReplica, request: GenerateRequest) -> None:
        self.request = request
        self.drawn = Drawn.of(request)
        self._replica = replica
        self.most_together = 0
        """Largest number of tokens that arrived at once."""
        self._news = asyncio.Condition()
        self._over = False
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> Drawn:
        try:
            async with aclosing(self._replica.generate(self.request)) as batches:
                async for events in batches:
                    self.drawn.take(events)
                    together = sum(isinstance(event, NewToken) for event in events)
                    self.most_together = max(self.most_together, together)
                    async with self._news:
                        self._news.notify_all()
        finally:
            self._over = True
            async with self._news:
                self._news.notify_all()
        assert all(sequence.reason for sequence in self.drawn.sequences)
        return self.drawn

    async def reached(self, length: int, index: int | None = None) -> None:
        """Wait until sequence ``index``, or each of them, has ``length`` tokens."""
        wanted = self.drawn.sequences if index is None else [self.drawn.sequences[index]]
        async with asyncio.timeout(DEADLINE_S), self._news:
            await self._news.wait_for(lambda: self._over or all(len(sequence.ids) >= length for sequence in wanted))
        assert all(len(sequence.ids) >= length for sequence in wanted)

    async def end(self) -> Drawn:
        """Wait for the result; raise the request's error."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.task

    async def cut(self, index: int | None = None) -> bool:
        """Cut it, or one of its sequences."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._replica.cut(self.request.request_id, index)

    async def cut_at_once(self, index: int | None = None) -> None:
        """Cut the request as soon as the replica knows it."""
        async with asyncio.timeout(DEADLINE_S):
            # A replica does not tell when it knows a request. Each cut that finds nothing gives the reader a turn of the loop.
            while not await self._replica.cut(self.request.request_id, index):  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def leave(self) -> None:
        """Stop reading."""
        self.task.cancel()
        await asyncio.wait([self.task])


class Versioned(Protocol):
    """Object with an adapter version, None for the bare base."""

    @property
    def version(self) -> AdapterVersion | None: ...


class Client:
    """A started replica, with short ways to send requests."""

    def __init__(self, replica: SamplerReplica) -> None:
        self.replica = replica
        self._numbers = count()

    def request(
        self,
        prompt: Sequence[int],
        who: Versioned,
        draw: Draw,
        *,
        topk: int = 0,
        scoring: PromptScoring | None = None,
    ) -> GenerateRequest:
        """Return a request with an id of its own."""
        return GenerateRequest(
            request_id=f"request-{next(self._numbers)}",
            prompt=np.array(prompt, np.int64),
            seeds=draw.seeds,
            max_tokens=draw.max_tokens,
            temperature=draw.temperature,
            top_k=draw.top_k,
            top_p=draw.top_p,
            stop_tokens=draw.stop_tokens,
            topk=topk,
            scoring=scoring,
            adapter=who.version,
            owner=draw.owner,
            tokens_at_a_time=draw.tokens_at_a_time,
        )

    def start(
        self,
        prompt: Sequence[int],
        who: Versioned,
        draw: Draw,
        *,
        topk: int = 0,
        scoring: PromptScoring | None = None,
    ) -> Running:
        """Send a request and read it in a task."""
        return Running(self.replica, self.request(prompt, who, draw, topk=topk, scoring=scoring))

    async def ask(
        self,
        prompt: Sequence[int],
        who: Versioned,
        draw: Draw,
        *,
        topk: int = 0,
        scoring: PromptScoring | None = None,
    ) -> Drawn:
        """Send a request and return its result."""
        return await self.start(prompt, who, draw, topk=topk, scoring=scoring).end()
