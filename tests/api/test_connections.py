"""A full server: the one with the most connections makes room for others, whose connections stay."""

import asyncio
from datetime import timedelta

import httpx
import pytest

from cli.connections import Connections
from contracts.operations import OptimStepped
from ledger.wakeups import operation_topic
from store.settings import Settings
from tests.api.conftest import Service, Tenant
from tests.api.test_slow_clients import answer_of, byte_by_byte, served

DEADLINE = 60
MOST = 24


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Few connections, and polls that are held for longer than the test takes."""
    return Settings(data_dir=settings.data_dir, max_connections=MOST, poll_hold=timedelta(seconds=30))


async def test_a_tenant_with_every_connection_in_use_leaves_room_for_another_and_cuts_none_of_the_others(
    cats: Tenant, dogs: Tenant, service: Service, settings: Settings
) -> None:
    theirs, ours = await dogs.operation(await dogs.run()), await cats.operation(await cats.run())
    async with asyncio.timeout(DEADLINE), served(service.app, settings) as port:
        base_url = f"http://127.0.0.1:{port}/api/v1"
        headers = {"X-API-Key": dogs.key}
        clients = [httpx.AsyncClient(base_url=base_url, timeout=DEADLINE, headers=headers) for _ in range(2)]
        first, later = clients
        # A key that this process has never seen counts as its address.
        for client in (dogs.http, cats.http):
            assert (await client.post("/client/config", json={})).status_code == 200
        poll = f'{{"request_id":"{ours}"}}'
        head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: {cats.key}\r\n"
        request = f"{head}Content-Length: {len(poll)}\r\n\r\n{poll}"
        flood = [asyncio.create_task(answer_of(port, byte_by_byte(request.encode(), b""))) for _ in range(3 * MOST)]
        # From then on those that are open are all that may be, each with a poll that is held.
        cut = asyncio.as_completed(flood)
        for _ in range(2 * MOST):
            assert await next(cut) == b""
        held = asyncio.create_task(first.post("/retrieve_future", json={"request_id": theirs}))
        await service.wakeups.until_listened(operation_topic(theirs))
        assert (await later.post("/client/config", json={})).status_code == 200
        await service.run_next(OptimStepped({}))
        assert (await held).status_code == 200
        await asyncio.gather(*flood, *(client.aclose() for client in clients))


def test_idle_connections_go_first_and_those_of_who_has_the_most() -> None:
    held: Connections[str] = Connections(4)
    for connection, holder in (("a1", "a"), ("b1", "b"), ("b2", "b")):
        held.put(connection, holder, is_idle=True)
    held.put("c1", "c", is_idle=False)
    assert not held.is_overfull
    ended = []
    for newest in ("d1", "d2", "d3"):
        held.put(newest, "d", is_idle=True)
        assert held.is_overfull
        ended.append(held.surplus(newest))
        held.put(newest, "d", is_idle=False)
    assert ended == ["b1", "a1", "b2"]
    held.put("e1", "e", is_idle=True)
    assert held.surplus("e1") == "d3"
    held.put("e1", "e", is_idle=False)
    held.remove("d1")
    held.remove("d2")
    held.put("f1", "f", is_idle=False)
    held.put("g1", "g", is_idle=False)
    held.put("h1", "h", is_idle=True)
    assert held.surplus("h1") == "h1"
    assert not held.is_overfull
