"""Samples of a sampling process that was killed: who follows one hands over what was read, wherever the sample stood."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import select

from contracts.prompt_cells import PromptCells
from engine.model.base import BaseModel
from ledger.token_feed import FeedKey, TokenFeed, TokensMade
from store.repeat import wait_for
from store.tables import Operation
from tests.workers.sampling.test_handed_over import LENGTH, SECONDS, Pool, Rig, base, rig_on
from workers.leases.reaper import reap_pools

__all__ = ["base"]


@pytest_asyncio.fixture
async def rig(database_url: str, base: BaseModel, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_on(database_url, base, tmp_path) as made:
        yield made


async def kill(rig: Rig, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the pool without a word, as a kill does, and have its peers reap it."""

    async def nothing(*_: object, **__: object) -> list[object]:
        return []

    identity, worker = pool.sampling.heartbeat.identity, pool.sampling.worker
    monkeypatch.setattr(worker._resumption, "save_at_end", nothing)
    monkeypatch.setattr(pool.sampling.heartbeat, "leave", nothing)
    await pool.end()
    async with rig.runtime.database.write() as transaction:
        await reap_pools(transaction, [identity.id], identity.base_model, rig.runtime)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_stream_goes_on_when_its_pool_is_killed_while_it_draws_or_waits_for_its_gate(
    rig: Rig, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token that was read is drawn again. An attempt counts for samples that were drawn alone."""
    first = await rig.pool()
    async with rig.stream(0) as mine, rig.stream(1, temperature=0.0) as beside:
        reading = [asyncio.create_task(one.read()) for one in (mine, beside)]
        await mine.until(20)
        await beside.until(20)
        if waits:
            await rig.pause()
        else:
            first.source.replica.running.clear()
        await kill(rig, first, monkeypatch)
        async with rig.runtime.database.read() as session:
            attempts = list(await session.scalars(select(Operation.attempts)))
        assert attempts == [0 if waits else 1] * 2
        # The age of what is handed over counts from its first token.
        assert [one.sample._order.progress().publication for one in (mine, beside)] == [0, 0]
        kept = len(mine.tokens) + len(beside.tokens)
        second = await rig.pool()
        if waits:
            await rig.resume()
        async with asyncio.timeout(SECONDS):
            ends = await asyncio.gather(*reading)
        assert [mine.tokens, beside.tokens] == ends
        assert second.source.replica.drawn <= 2 * LENGTH - kept


async def test_scores_that_were_asked_for_are_in_the_result_when_the_pool_is_killed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No follower has them, so the sample is drawn again. One beside that asks for none goes on."""
    first, cells = await rig.pool(), PromptCells(np.array([[6], [7]]), 1)
    scored = rig.stream(0, temperature=0.0, target_prompt_logprobs=cells, prompt_alt_tokens_k=2)
    async with scored as mine, rig.stream(1) as beside:
        reading = [asyncio.create_task(one.read()) for one in (mine, beside)]
        await mine.until(20)
        await beside.until(20)
        first.source.replica.running.clear()
        await kill(rig, first, monkeypatch)
        kept = len(beside.tokens)
        second = await rig.pool()
        async with asyncio.timeout(SECONDS):
            ends = await asyncio.gather(*reading)
        output = await mine.sample.output()
        assert [mine.tokens, beside.tokens] == ends
        assert second.source.replica.drawn <= 2 * LENGTH - kept
    assert output.target_prompt_logprobs is not None
    assert output.target_prompt_logprobs.values.shape == (2, 1)
    assert output.prompt_alt_tokens is not None
    assert output.prompt_alt_tokens.tokens.shape == (2, 2)


class Channel(TokenFeed):
    """A pool's end of a feed. What is published stays queued while it ``is_frozen``, as in a process that stands still."""

    def __init__(self, feed: TokenFeed) -> None:
        super().__init__()
        self._feed = feed
        self.is_frozen = False
        self.queued: list[tuple[FeedKey, Sequence[TokensMade]]] = []

    def is_followed(self, key: FeedKey) -> bool:
        return self._feed.is_followed(key)

    def take_asked_again(self, key: FeedKey) -> Mapping[int, int]:
        return self._feed.take_asked_again(key)

    def publish(self, key: FeedKey, made: Sequence[TokensMade]) -> None:
        self.queued.append((key, made))
        if not self.is_frozen:
            self.thaw()

    def thaw(self) -> None:
        """Send what is queued."""
        queued, self.queued = self.queued, []
        for key, made in queued:
            self._feed.publish(key, made)


async def test_tokens_that_a_frozen_pool_had_queued_do_not_disturb_the_one_that_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = Channel(rig.runtime.feed)
    first = await rig.pool(channel)
    async with rig.stream(0) as mine, rig.stream(1) as beside:
        streams = (mine, beside)
        reading = [asyncio.create_task(one.read()) for one in streams]
        for stream in streams:
            await stream.until(20)
        channel.is_frozen = True
        async with asyncio.timeout(SECONDS):
            while len({key for key, _ in channel.queued}) < len(streams):
                await wait_for(asyncio.Event(), 0.02)
        first.source.replica.running.clear()
        await kill(rig, first, monkeypatch)
        had = [len(stream.tokens) for stream in streams]
        second = await rig.pool()
        for stream, count in zip(streams, had, strict=True):
            await stream.until(count + 20)
        second.source.replica.running.clear()
        channel.thaw()
        second.source.replica.running.set()
        async with asyncio.timeout(SECONDS):
            ends = await asyncio.gather(*reading)
        assert [mine.tokens, beside.tokens] == ends
