"""Clients that send nothing, or too slowly, or read nothing, or open too much, end in time and hold nobody up."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import httpx
import pytest
import pytest_asyncio
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cli.http_protocol import protocol
from contracts.operations import OptimStepped
from ledger.wakeups import operation_topic
from store.settings import Settings
from tests.api.conftest import Service, Tenant

DEADLINE = 60
SHORT = timedelta(seconds=0.5)
MOST_CONNECTIONS = 24
POLLS = 3


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Short time limits and few polls."""
    return Settings(
        data_dir=settings.data_dir,
        header_timeout=SHORT,
        body_timeout=SHORT,
        send_timeout=SHORT,
        max_connections=MOST_CONNECTIONS,
        tenant_polls=POLLS,
        poll_hold=timedelta(seconds=20),
    )


@asynccontextmanager
async def served(app: ASGIApp, settings: Settings) -> AsyncIterator[int]:
    """Serve ``app`` as ``weft api`` does; yields the port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = uvicorn.Config(app, http=protocol(settings), log_level=logging.ERROR, lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


@pytest_asyncio.fixture
async def port(service: Service, settings: Settings) -> AsyncIterator[int]:
    """The port of the API with its time limits."""
    async with served(service.app, settings) as port:
        yield port


async def answer_of(port: int, dribble: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> bytes:
    """Everything that the server said until it ended the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = bytearray()

    async def read() -> None:
        while piece := await reader.read(65536):
            said.extend(piece)

    dribbling = asyncio.ensure_future(dribble(writer))
    try:
        await read()
    except ConnectionError:
        pass
    finally:
        dribbling.cancel()
        writer.close()
    return bytes(said)


def byte_by_byte(head: bytes, every: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """Send ``head`` at once, and then ``every`` again and again, for ever."""

    async def dribble(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while every:
            await asyncio.sleep(0.05)
            writer.write(every)

    return dribble


HEAD = b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\n"
STRANGERS = {
    "nothing": byte_by_byte(b"", b""),
    "empty lines": byte_by_byte(b"", b"\r\n"),
    "half a header": byte_by_byte(HEAD, b""),
    "headers for ever": byte_by_byte(HEAD, b"a: b\r\n"),
    "a body without a key": byte_by_byte(HEAD + b"Content-Length: 1000000\r\n\r\n", b"x"),
    "a second request's header": byte_by_byte(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD, b"a: b\r\n"),
}


@pytest.mark.parametrize("stranger", list(STRANGERS))
async def test_a_connection_without_a_key_ends_in_time(port: int, dogs: Tenant, stranger: str) -> None:
    session = await dogs.session()
    async with asyncio.timeout(DEADLINE):
        ended = asyncio.create_task(answer_of(port, STRANGERS[stranger]))
        while not ended.done():
            answer = await dogs.http.post("/session_heartbeat", json={"session_id": session})
            assert answer.status_code == 200
        said = await ended
    assert b" 200 " not in said or b"second" in stranger.encode()


async def test_a_body_that_stops_coming_is_408_and_holds_no_place(port: int, cats: Tenant, service: Service) -> None:
    head = HEAD + b"X-API-Key: " + cats.key.encode() + b"\r\nContent-Length: 1000000\r\n\r\n"
    async with asyncio.timeout(DEADLINE):
        for dribble in (byte_by_byte(head, b""), byte_by_byte(head, b"x")):
            assert b"body_too_slow" in await answer_of(port, dribble)
    assert service.services.admission.body_bytes.used(cats.id) == 0


async def test_a_client_that_does_not_read_is_cut_off(settings: Settings) -> None:
    ended = asyncio.Event()

    async def endless(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        # Once the connection is cut off, sends end at once.
        for _ in range(512):
            await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
        ended.set()

    async with served(endless, settings) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(DEADLINE):
            await ended.wait()
        writer.close()


async def test_idle_strangers_leave_room_for_a_tenant(port: int, dogs: Tenant) -> None:
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MOST_CONNECTIONS)]
    async with asyncio.timeout(DEADLINE), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=40) as http:
        answer = await http.post("/api/v1/client/config", json={}, headers={"X-API-Key": dogs.key})
        assert answer.status_code == 200
    for _, writer in strangers:
        writer.close()


async def test_polls_beyond_a_tenants_share_wait_for_a_place_or_are_told_to_poll_again(
    cats: Tenant, dogs: Tenant, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = await cats.run(), await dogs.run()
    ids = [await cats.operation(run, seq_id=seq_id) for seq_id in range(1, POLLS + 1)]
    theirs = await dogs.operation(other)

    async def poll(tenant: Tenant, request_id: str) -> httpx.Response:
        return await tenant.http.post("/retrieve_future", json={"request_id": request_id})

    held = [asyncio.create_task(poll(cats, one)) for one in ids]
    for one in ids:
        await service.wakeups.until_listened(operation_topic(one))
    told = await poll(cats, ids[0])
    assert (told.status_code, told.json()["type"], told.json()["code"]) == (408, "try_again", "poll_again")
    assert told.json()["queue_state"] == "paused_rate_limit"
    assert str(POLLS) in told.json()["queue_state_reason"]
    sampler = {"target": {"type": "sampling_session", "sampling_session_id": "x"}, "timeout": 0}
    assert (await cats.http.post("/retrieve_futures", json=sampler)).status_code == 408
    their_poll = asyncio.create_task(poll(dogs, theirs))
    await service.wakeups.until_listened(operation_topic(theirs))
    monkeypatch.setattr("api.admission.POLL_PATIENCE_SECONDS", 300.0)
    waiting = asyncio.create_task(poll(cats, ids[0]))
    await service.run_next(OptimStepped({}))
    # The operation's end frees its place, which the poll that waits takes.
    assert {(await one).status_code for one in (held[0], waiting, their_poll)} == {200}
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


LINE = b"a" * 65536
TOO_LARGE = {
    "a header": (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: ", LINE),
    "an address": (b"GET /healthz?", LINE),
    "many headers": (b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"a:b\r\n" * 1000),
    "trailers": (b"POST /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"a:b\r\n" * 1000),
    "a trailer": (b"POST /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: ", LINE),
    "framing": (b"POST /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000),
    "a chunk's extension": (b"POST /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", LINE),
    "pipelined requests": (b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 1000),
}
ENOUGH = 256
"""Pieces after which a client has sent more than anybody may, and more than is on its way in sockets."""


def unhurried(settings: Settings) -> Settings:
    """The same without the short time limits."""
    return settings.model_copy(update={"header_timeout": timedelta(hours=1), "body_timeout": timedelta(hours=1)})


@pytest.mark.parametrize("large", list(TOO_LARGE))
async def test_what_is_beside_a_body_is_bounded(service: Service, settings: Settings, large: str) -> None:
    """The connection ends long before any time limit. One with large headers that are allowed is answered beside it."""
    head, piece = TOO_LARGE[large]
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(head)
        while sent < ENOUGH:
            writer.write(piece)
            await writer.drain()
            sent += 1

    async with served(service.app, unhurried(settings)) as port, asyncio.timeout(DEADLINE):
        said = await answer_of(port, flood)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as other:
            answer = await other.get("/healthz", headers={f"x-{number}": "b" * 400 for number in range(100)})
            assert answer.status_code == 200
    if large in ("a header", "an address", "many headers"):
        assert said == b"" or said.startswith(b"HTTP/1.1 431 ")


async def test_a_head_that_is_too_large_is_told(service: Service, settings: Settings, dogs: Tenant) -> None:
    """The client reads what it may send, and another one's connection goes on."""
    async with (
        served(service.app, unhurried(settings)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        assert (await client.get("/healthz")).status_code == 200
        for headers in ({"x-a": "a" * 70_000}, {f"x-{number}": "b" for number in range(200)}):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as other:
                refused = await other.get("/healthz", headers=headers)
                assert refused.status_code == 431
                assert "send fewer or shorter ones" in refused.text
        assert (await client.get("/healthz")).status_code == 200
    await dogs.session()


@pytest.mark.parametrize("address", ["http://", "http://a", "/é"])
async def test_what_cannot_be_parsed_is_no_large_head(port: int, address: str) -> None:
    """A client that reads of a size would look for what it has not sent."""

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(f"GET {address} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    async with asyncio.timeout(DEADLINE):
        assert (await answer_of(port, send)).startswith(b"HTTP/1.1 400 ")


async def test_a_body_in_small_chunks_is_taken(service: Service, settings: Settings, dogs: Tenant) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20_000):
            yield b" " * 8
        yield b"{}"

    async with (
        served(service.app, unhurried(settings)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1", headers=dogs.http.headers) as client,
    ):
        answer = await client.post("/forward_backward", content=pieces())
        assert "model_id" in answer.text
    await dogs.session()
