"""Streams end with their session, however it ends, and those of other sessions go on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from datetime import timedelta
from unittest.mock import patch

import pytest
from fastapi import Request
from sqlalchemy import delete, update

from api.dashboard.session_watch import SessionWatch
from store.tables import ApiKey, Tenant, WebSession
from tenants.projects import create_project
from tenants.reach import default_project
from tenants.web_sessions import WebSessionReader
from tests.api.dashboard.test_run_feeds import statements, step
from tests.api.dashboard.visits import key_of, visitor

SECONDS = 60
SESSIONS = 8
LOOK = timedelta(minutes=15)


async def _expire(service, _cats, _key) -> None:
    service.clock.move(minutes=16)


async def _end_elsewhere(service, cats, _key) -> None:
    async with service.database.write() as transaction:
        await transaction.execute(delete(WebSession).where(WebSession.tenant_id == cats.id))


async def _block(service, cats, _key) -> None:
    async with service.database.write() as transaction:
        tenant = update(Tenant).where(Tenant.id == cats.id)
        await transaction.execute(tenant.values(suspended_at=service.clock(), suspend_mode="blocked"))


async def _move_network(service, _cats, key) -> None:
    async with service.database.write() as transaction:
        await transaction.execute(update(ApiKey).where(ApiKey.id == key.id).values(networks=["10.0.0.0/8"]))


ENDS: list[Callable[..., Awaitable[None]]] = [_expire, _end_elsewhere, _block, _move_network]


async def _until(lines: AsyncIterator[str], wanted: str) -> None:
    async for line in lines:
        if line == wanted:
            return
    raise AssertionError(f"the stream ended without {wanted}")


@pytest.mark.parametrize("end", ENDS)
async def test_a_stream_ends_with_its_session_and_another_tenants_goes_on(service, cats, dogs, end) -> None:
    key = await key_of(service, cats, expires_at=service.clock() + LOOK)
    own, theirs = await cats.run(), await dogs.run()
    async with (
        asyncio.timeout(SECONDS),
        visitor(service, key.secret) as http,
        visitor(service, dogs.key) as other,
        http.stream("GET", f"/ui/runs/{own}/events") as answer,
        other.stream("GET", f"/ui/runs/{theirs}/events") as going,
    ):
        lines, others = answer.aiter_lines(), going.aiter_lines()
        await _until(lines, "event: standing")
        await end(service, cats, key)
        assert [line async for line in lines if line.startswith("retry")] == []
        await step(dogs, theirs, 1)
        await _until(others, "event: points")


async def test_a_stream_ends_once_its_run_is_in_a_project_that_its_key_does_not_reach(service, cats, dogs) -> None:
    async with service.database.write() as transaction:
        project = (await create_project(transaction, cats.id, "archive", service.clock)).id
    bound = await key_of(service, cats, projects=frozenset({default_project(cats.id)}))
    own, theirs = await cats.run(), await dogs.run()
    staying = await cats.run()
    async with AsyncExitStack() as stack, asyncio.timeout(SECONDS):
        browsers = [
            await stack.enter_async_context(visitor(service, key)) for key in (bound.secret, cats.key, dogs.key)
        ]
        watching = ((0, own), (0, staying), (1, own), (2, theirs))
        streams = []
        for browser, run in watching:
            answer = await stack.enter_async_context(browsers[browser].stream("GET", f"/ui/runs/{run}/events"))
            streams.append(answer.aiter_lines())
            await _until(streams[-1], "event: standing")
        session = own.partition(":")[0]
        moved = await cats.http.put(f"/sessions/{session}/project", json={"project_id": project})
        assert moved.is_success, moved.text
        assert [line async for line in streams[0] if line.startswith("retry")] == []
        for run, tenant, lines in zip((staying, own, theirs), (cats, cats, dogs), streams[1:], strict=True):
            await step(tenant, run, 1)
            await _until(lines, "event: points")


async def test_a_silent_stream_says_that_it_is_there_and_ends_with_the_process(
    service, cats, dogs, monkeypatch
) -> None:
    monkeypatch.setattr("api.dashboard.events.KEEP_ALIVE_SECONDS", 0.05)
    runs = [await cats.run(), await dogs.run()]
    async with (
        asyncio.timeout(SECONDS),
        visitor(service, cats.key) as http,
        visitor(service, dogs.key) as other,
        http.stream("GET", f"/ui/runs/{runs[0]}/events") as answer,
        other.stream("GET", f"/ui/runs/{runs[1]}/events") as going,
    ):
        streams = [answer.aiter_lines(), going.aiter_lines()]
        for lines in streams:
            await _until(lines, ": still here")
        service.wakeups.close()
        for lines in streams:
            assert [line async for line in lines if line.startswith("retry")] == []


async def test_streams_of_one_session_are_looked_at_together(service, cats, dogs) -> None:
    run, theirs = await cats.run(), await dogs.run()
    looked: list[str] = []
    async with AsyncExitStack() as stack, asyncio.timeout(SECONDS):
        http, other = [await stack.enter_async_context(visitor(service, one.key)) for one in (cats, dogs)]
        streams = []
        for browser, place in ((http, run), (http, run), (http, run), (other, theirs)):
            answer = await stack.enter_async_context(browser.stream("GET", f"/ui/runs/{place}/events"))
            streams.append(answer.aiter_lines())
            await _until(streams[-1], "event: standing")
        looks, principal = asyncio.Event(), WebSessionReader.principal

        async def counted(reader, token, address):
            looked.append(token)
            looks.set()
            return await principal(reader, token, address)

        stack.enter_context(patch.object(WebSessionReader, "principal", counted))
        await looks.wait()
        # The look has asked for all of them by now.
        await asyncio.sleep(0)
    assert len(looked) == len(set(looked)) == 2


async def test_a_look_reads_the_runs_of_all_sessions_of_bound_keys_together(service, cats, dogs, monkeypatch) -> None:
    """A statement for each session would hold the loop up longer with every one, each second."""
    async with service.database.write() as transaction:
        project = (await create_project(transaction, cats.id, "archive", service.clock)).id
    runs, theirs = [await cats.run() for _ in range(SESSIONS)], await dogs.run()
    watch = SessionWatch(service.services.batched_reads.web_sessions, service.database)
    # The watch's own looks would be counted, too.
    monkeypatch.setattr("api.dashboard.session_watch.LOOK_SECONDS", 3600.0)
    with ExitStack() as stack:
        ended = []
        for tenant, run in [*((cats, run) for run in runs), (dogs, theirs)]:
            key = await key_of(service, tenant, projects=frozenset({default_project(tenant.id)}))
            async with visitor(service, key.secret) as http:
                headers = [(b"host", b"weft"), (b"cookie", http.headers["cookie"].encode())]
            request = Request(
                {"type": "http", "scheme": "https", "path": "/ui", "headers": headers, "client": ("127.0.0.1", 1)}
            )
            ended.append(stack.enter_context(watch.watch(request, run=run)))
        moved = await cats.http.put(f"/sessions/{runs[0].partition(':')[0]}/project", json={"project_id": project})
        assert moved.is_success, moved.text
        with statements(service) as noted:
            await watch._look()
        assert len(noted) == 2, noted
        assert [one.is_set() for one in ended] == [True] + [False] * SESSIONS
