"""Requests that wait hold no connection to the database: there may be more of them than connections."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest
from sqlalchemy import event, func, select

from api.dashboard.events import MOST_STREAMS
from contracts.vocabulary import BaseVocabulary
from ledger.wakeups import operation_topic, run_steps_topic
from store.database import DEFAULT_POOL
from store.pending_operations import IS_PENDING, IS_SAMPLE
from store.settings import Settings
from store.tables import Operation
from tests.api.conftest import BASE, Service
from tests.api.dashboard.test_run_feeds import step
from tests.api.dashboard.visits import key_of, visitor

SECONDS = 60
WAITING = DEFAULT_POOL + MOST_STREAMS
"""Requests of one kind that wait at once."""


@pytest.fixture
def settings(settings: Settings, migrated_postgres_url: str) -> Settings:
    """Settings of PostgreSQL, whose connections are few."""
    return settings.model_copy(update={"database_url": migrated_postgres_url})


async def until_none_is_held(service: Service) -> None:
    """Wait until no connection is in use, which never comes while a request that waits holds one."""
    pool, returned = service.database.engine.sync_engine.pool, asyncio.Event()

    def note(*_: object) -> None:
        returned.set()

    event.listen(pool, "checkin", note)
    try:
        while pool.checkedout():
            await returned.wait()
            returned.clear()
    finally:
        event.remove(pool, "checkin", note)


async def pending_samples(service: Service) -> int:
    async with service.database.read() as session:
        return await session.scalar(select(func.count()).select_from(Operation).where(IS_PENDING, IS_SAMPLE)) or 0


async def test_streams_of_pages_hold_no_connection_while_they_are_silent(service, cats, dogs) -> None:
    mine, theirs = await cats.run(), await dogs.run()
    async with AsyncExitStack() as stack, asyncio.timeout(SECONDS):
        streams = []
        for number in range(WAITING // MOST_STREAMS):
            tenant, run = ((cats, mine), (dogs, theirs))[number % 2]
            http = await stack.enter_async_context(visitor(service, (await key_of(service, tenant)).secret))
            for _ in range(MOST_STREAMS):
                answer = await stack.enter_async_context(http.stream("GET", f"/ui/runs/{run}/events"))
                assert answer.status_code == 200
                streams.append((run, answer.aiter_lines()))
        assert len(streams) == WAITING > DEFAULT_POOL
        for _, lines in streams:
            while await anext(lines) != "event: standing":
                pass
        await until_none_is_held(service)
        await step(cats, mine, 1)
        for run, lines in streams:
            while run == mine and await anext(lines) != "event: points":
                pass
        await service.wakeups.until_listened(run_steps_topic(theirs))
        await until_none_is_held(service)


async def test_polls_hold_no_connection_while_they_are_held(service, cats, dogs) -> None:
    run, theirs = await cats.run(), await dogs.run()
    async with asyncio.timeout(SECONDS):
        requests = [await cats.operation(run, number + 1) for number in range(WAITING)]
        beside = await dogs.operation(theirs)
        polls = [
            asyncio.create_task(tenant.http.post("/retrieve_future", json={"request_id": one}))
            for tenant, one in [(dogs, beside), *((cats, one) for one in requests)]
        ]
        for one in (*requests, beside):
            await service.wakeups.until_listened(operation_topic(one))
        await until_none_is_held(service)
        assert not [poll for poll in polls if poll.done()]
        assert (await dogs.http.get(f"/training_runs/{theirs}")).status_code == 200
        for poll in polls:
            poll.cancel()


async def test_samples_that_are_streamed_hold_no_connection_before_their_first_token(service, cats, dogs) -> None:
    words = BaseVocabulary(frozenset(), encode=lambda text: [7] * len(text), decode=lambda tokens: "x" * len(tokens))
    service.services.vocabularies[BASE] = words
    body = {"model": BASE, "prompt": "hi", "max_tokens": 4, "stream": True}
    async with asyncio.timeout(SECONDS), httpx.AsyncClient(base_url=service.url, timeout=SECONDS) as http:
        asked = [
            asyncio.create_task(http.post("/v1/completions", json=body, headers={"X-API-Key": tenant.key}))
            for tenant in (cats, dogs)
            for _ in range(WAITING // 2)
        ]
        while await pending_samples(service) < WAITING:
            assert not [one.result().text for one in asked if one.done()]
        await until_none_is_held(service)
        assert not [one.result().text for one in asked if one.done()]
        for one in asked:
            one.cancel()
