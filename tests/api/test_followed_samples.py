"""Samples that are followed through an outage of the database, or of the feed of their tokens."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from api.followed_sample import FollowedSample
from contracts.errors import Unavailable
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import OperationStatus
from ledger.ledger import Ledger
from ledger.token_feed import FeedKey, TokenFeed, TokensMade
from tests.api.conftest import Tenant
from tests.api.test_sample_submission import sampler

FAILURES = 3


async def test_an_outage_is_told_once_for_each_followed_sample(
    cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("api.followed_sample._OUTAGE_SECONDS", 0.02)
    whole, asked, is_over = Ledger.wait_until_final, Counter[str](), asyncio.Event()

    async def failing(ledger: Ledger, tenant: TenantId, request: RequestId, **more: Any) -> OperationStatus:
        asked[request] += 1
        if asked[request] <= FAILURES:
            raise Unavailable("the database does not answer")
        if len(asked) == 2 and min(asked.values()) > FAILURES:
            is_over.set()
        return await whole(ledger, tenant, request, **more)

    monkeypatch.setattr(Ledger, "wait_until_final", failing)
    streams: list[AsyncIterator[str]] = []
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        stack.enter_context(caplog.at_level(logging.WARNING, "api.followed_sample"))
        for tenant in (cats, dogs):
            prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
            body = {"sampling_session_id": await sampler(tenant), "seq_id": 0, "prompt": prompt, "sampling_params": {}}
            answer = await stack.enter_async_context(tenant.http.stream("POST", "/stream_sample", json=body))
            # An iterator that is forgotten closes its stream.
            streams.append(answer.aiter_lines())
            assert await anext(streams[-1]) == "event: accepted"
        await is_over.wait()
    told = [record.getMessage() for record in caplog.records if "is followed on" in record.getMessage()]
    assert len(told) == len(asked) == 2
    assert all(sum(request in line for line in told) == 1 for request in asked)


class NotedFeed(TokenFeed):
    """Notes what is asked for again."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[FeedKey, Mapping[int, int]]] = []

    def ask_again(self, key: FeedKey, heard: Mapping[int, int]) -> None:
        self.asked.append((key, dict(heard)))
        super().ask_again(key, heard)


async def test_a_gap_is_asked_for_once_from_the_followers_own_place_and_again_if_it_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("api.followed_sample.monotonic", lambda: now)
    feed = NotedFeed()

    def part(start: int, count: int, sequence: int = 0) -> TokensMade:
        return TokensMade(sequence, start, None, list(range(start, start + count)), [-1.0] * count)

    with feed.follow(("cat", 0)) as queue, feed.follow(("dog", 0)) as beside:
        cat, dog = (
            FollowedSample(
                SimpleNamespace(feed=feed),  # type: ignore[arg-type]
                SimpleNamespace(key=key, sample=SimpleNamespace(num_samples=2)),  # type: ignore[arg-type]
                RequestId(key[0]),
                one,
                asyncio.get_running_loop().create_future(),  # type: ignore[arg-type]
            )
            for key, one in ((("cat", 0), queue), (("dog", 0), beside))
        )
        theirs = dog.tokens()
        feed.publish(("dog", 0), [part(0, 5)])
        assert [one.start for one in await anext(theirs)] == [0]
        feed.publish(("cat", 0), [part(0, 20), part(0, 3, sequence=1)])
        # Parts on their way when the gap is seen.
        for start in (25, 26, 27):
            feed.publish(("cat", 0), [part(start, 1), part(3 + start - 25, 1, sequence=1)])
        mine = cat.tokens()
        assert sum(len(one.tokens) for one in await anext(mine)) == 26
        assert feed.asked == [(("cat", 0), {0: 20})]
        now += 5.0
        feed.publish(("cat", 0), [part(28, 1), part(9, 1, sequence=1)])
        feed.publish(("cat", 0), [part(20, 9)])
        assert [(one.start, len(one.tokens)) for one in await anext(mine)] == [(20, 9)]
        assert feed.asked[1:] == [(("cat", 0), {0: 20, 1: 6})]
        feed.publish(("cat", 0), [part(40, 1)])
        feed.publish(("cat", 0), [part(29, 1)])
        assert [one.start for one in await anext(mine)] == [29]
        assert feed.asked[2:] == [(("cat", 0), {0: 29})]
