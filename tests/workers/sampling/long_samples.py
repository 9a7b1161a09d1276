"""Samples that have many tokens already, and a follower that reads what is published of one."""

import asyncio
from collections.abc import Sequence

import numpy as np

from api.token_order import TokenOrder
from contracts.ids import TenantId
from contracts.operations import SampledSequence, SampleOutput, SampleRequest, SamplingParams
from contracts.sample_report import SequenceReport, VersionSpan
from engine.sampling.replica import NewToken
from ledger.token_feed import FeedKey, TokenFeed, TokensMade
from workers.sampling.continuation import Continuation
from workers.sampling.stop_conditions import StopRules
from workers.sampling.token_publisher import TokenPublisher


class LongSample:
    """A sample whose sequences have ``length`` tokens each, of which its followers may have none."""

    def __init__(self, tenant: str, length: int, *, sequences: int = 1) -> None:
        self.tenant = TenantId(tenant)
        self.key: FeedKey = (f"lane of {tenant}", 0)
        request = SampleRequest(np.array([5, 6, 7]), sequences, SamplingParams(seed=1))
        self.continuation = Continuation(
            f"op of {tenant}", request, StopRules(2 * length + 1000, frozenset(), (), None)
        )
        drawn = SampledSequence("length", np.arange(length, dtype=np.int32), np.full(length, -0.123456789, np.float32))
        report = SequenceReport("", [VersionSpan(None, 0, length)] if length else [])
        self.continuation.resume(SampleOutput([drawn] * sequences), [report] * sequences, restarts=0)
        self._requests = self.continuation.requests(None, 2)
        self._next = length

    @property
    def whole(self) -> list[int]:
        """Tokens of the first sequence."""
        return self.continuation.so_far().sequences[0].tokens.tolist()

    def draw(self, publisher: TokenPublisher) -> None:
        """Draw a token of each sequence, and publish."""
        drawn = [(request, index) for request in self._requests for index in range(len(request.seeds))]
        for request, index in drawn:
            self.continuation.take(request, NewToken(index, self._next, -0.123456789))
        self._next += 1
        publisher.publish(self.key, self.tenant, self.continuation, len(drawn))


class Follower:
    """A reader of one sample: takes in what its queue has, and asks for what is missing."""

    def __init__(self, feed: TokenFeed, sample: LongSample, queue: "asyncio.Queue[Sequence[TokensMade]]") -> None:
        self._feed = feed
        self._sample = sample
        self._queue = queue
        self._order = TokenOrder(len(sample.continuation.reports()))
        self.came: list[TokensMade] = []
        """Parts as they came, with those that brought nothing new."""

    def read(self) -> None:
        """Take in what has come."""
        while not self._queue.empty():
            made = self._queue.get_nowait()
            self.came += made
            self._order.take(made)
            if self._order.gaps:
                self._feed.ask_again(self._sample.key, self._order.gaps)

    async def read_next(self) -> None:
        """Wait for the next part and take it in."""
        made = await self._queue.get()
        self._queue.put_nowait(made)
        self.read()

    def heard(self, sequence: int = 0) -> list[int]:
        """Return the tokens of a sequence that have come without a gap."""
        return self._order.progress().output.sequences[sequence].tokens.tolist()

    def forget(self) -> None:
        """Lose what has come and was not read."""
        while not self._queue.empty():
            self._queue.get_nowait()
