"""Long answers break off with the web session, the key or the tenant that asked for them; those of others go on to their ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi.responses import StreamingResponse
from sqlalchemy import update
from starlette.types import Message

from api.endable_response import EndableResponse
from api.weft.points import read_points
from store.repeat import wait_for_any
from store.tables import ApiKey
from tenants.audit_log import read_entries
from tenants.rights import SuspendMode
from tenants.suspensions import suspend_tenant
from tenants.usage_exports import usage_records
from tests.api.conftest import BASE
from tests.api.dashboard.visits import key_of, visitor
from tests.api.test_points import steps
from tests.api.test_usage import work

SECONDS = 60
PACE_SECONDS = 0.02
LARGE_BYTES = 2**26
SINCE = "2026-01-01T00:00:00Z"


@pytest.fixture
def enough(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Make long answers endless: each reads its first page again and again, some fifty times a second, until this event."""
    event = asyncio.Event()

    async def points(*args: Any, after: int, **more: Any) -> Any:
        await wait_for_any([event], PACE_SECONDS)
        return await read_points(*args, after=after if event.is_set() else 0, **more)

    async def records(*args: Any, **more: Any) -> AsyncIterator[Any]:
        while not await wait_for_any([event], PACE_SECONDS):
            async for page in usage_records(*args, **more):
                yield page

    async def entries(*args: Any, **more: Any) -> Any:
        await wait_for_any([event], PACE_SECONDS)
        page = await read_entries(*args, **more | {"cursor": None})
        return page if event.is_set() else replace(page, next="more")

    monkeypatch.setattr("api.dashboard.tenant.run.read_points", points)
    monkeypatch.setattr("api.dashboard.tenant.run.MOST_POINTS", 1)
    monkeypatch.setattr("api.weft.usage_export.usage_records", records)
    monkeypatch.setattr("api.tinker.audit.read_entries", entries)
    return event


class Reading:
    """Answers whose first pieces have come."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._pieces: list[AsyncIterator[bytes]] = []

    async def __aenter__(self) -> "Reading":
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._stack.__aexit__(*failure)

    async def begin(self, http: httpx.AsyncClient, *paths: str) -> None:
        for path in paths:
            answer = await self._stack.enter_async_context(http.stream("GET", path))
            assert answer.status_code == 200, path
            pieces = answer.aiter_bytes()
            assert await anext(pieces)
            self._pieces.append(pieces)

    async def check_broken_off(self) -> None:
        for pieces in self._pieces:
            with pytest.raises(httpx.RemoteProtocolError):
                await _rest(pieces)

    async def check_whole(self) -> None:
        for pieces in self._pieces:
            assert await _rest(pieces)


async def _rest(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def _log_out(_service, http: httpx.AsyncClient, _key) -> None:
    assert (await http.post("/ui/logout")).status_code == 303


async def _expire(service, _http, _key) -> None:
    service.clock.move(minutes=16)


async def _revoke(service, _http, key) -> None:
    async with service.database.write() as transaction:
        await transaction.execute(update(ApiKey).where(ApiKey.id == key.id).values(revoked_at=service.clock()))


async def _block(service, _http, _key) -> None:
    async with service.database.write() as transaction:
        now = service.clock()
        await suspend_tenant(transaction, name="cats", reason="unpaid", now=now, mode=SuspendMode.BLOCKED)


ENDS: list[Callable[..., Awaitable[None]]] = [_log_out, _expire, _revoke]


@pytest.mark.parametrize("end", ENDS)
async def test_downloads_of_pages_break_off_with_their_web_session(service, cats, dogs, enough, end) -> None:
    paths = []
    for tenant in (cats, dogs):
        run = await tenant.run()
        await steps(tenant, run, [4.0])
        await work(tenant)
        paths.append((f"/ui/runs/{run}/points.csv", "/ui/usage/export"))
    service.clock.move(hours=2)
    key = await key_of(service, cats, expires_at=service.clock() + timedelta(minutes=15))
    theirs = await key_of(service, dogs)
    async with (
        asyncio.timeout(SECONDS),
        visitor(service, key.secret) as http,
        visitor(service, theirs.secret) as other,
        Reading() as own,
        Reading() as going,
    ):
        await own.begin(http, *paths[0])
        await going.begin(other, *paths[1])
        await end(service, http, key)
        await own.check_broken_off()
        enough.set()
        await going.check_whole()


@pytest.mark.parametrize("end", [_revoke, _block])
async def test_exports_of_usage_and_the_audit_log_break_off_with_their_key(service, cats, dogs, enough, end) -> None:
    paths = (f"/api/weft/v1/usage/export?since={SINCE}", "/api/v1/audit")
    keys = [await key_of(service, tenant) for tenant in (cats, dogs)]
    clients = [httpx.AsyncClient(base_url=service.url, timeout=40, headers={"X-API-Key": key.secret}) for key in keys]
    for tenant in (cats, dogs):
        await work(tenant)
    service.clock.move(hours=2)
    async with asyncio.timeout(SECONDS), clients[0] as http, clients[1] as other, Reading() as own, Reading() as going:
        for one in clients:
            (await one.post("/api/weft/v1/projects", json={"name": "bones"})).raise_for_status()
        await own.begin(http, *paths)
        await going.begin(other, *paths)
        await end(service, http, keys[0])
        await service.services.ended_keys.look()
        await own.check_broken_off()
        enough.set()
        await going.check_whole()


@pytest.mark.parametrize("end", [_revoke, _expire, _block])
async def test_a_file_of_the_hub_breaks_off_with_its_key(service, cats, dogs, end) -> None:
    """The file is longer than what the sockets between the service and a client that does not read hold."""
    for repository in service.services.tokenizers.values():
        with repository.files["config.json"].path.open("ab") as file:
            file.truncate(LARGE_BYTES)
    soon = service.clock() + timedelta(minutes=15)
    keys = [await key_of(service, cats, expires_at=soon), await key_of(service, dogs)]
    clients = [httpx.AsyncClient(base_url=service.url, timeout=40, headers={"X-API-Key": key.secret}) for key in keys]
    async with asyncio.timeout(SECONDS), clients[0] as http, clients[1] as other, Reading() as own, Reading() as going:
        await own.begin(http, f"/{BASE}/resolve/main/config.json")
        await going.begin(other, f"/{BASE}/resolve/main/config.json")
        await end(service, http, keys[0])
        await service.services.ended_keys.look()
        await own.check_broken_off()
        await going.check_whole()


async def test_others_have_their_turn_between_two_pieces_of_a_long_answer() -> None:
    """The pieces are made, and taken by the socket, without a wait."""
    loop, ran = asyncio.get_running_loop(), list[int]()

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(3):
            loop.call_soon(ran.append, number)
            yield b"piece"
            assert number in ran, "another task waited for the whole answer"

    async def send(_message: Message) -> None:
        pass

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    answer = EndableResponse(StreamingResponse(pieces()), lambda: False)
    await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    assert ran == [0, 1, 2]
