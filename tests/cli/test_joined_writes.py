"""The head of an answer goes out with its body; nothing is held back that a client could use."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from cli.http_protocol import LimitedProtocol, protocol
from store.settings import Settings

DEADLINE = 90.0
PIECE = 64 * 1024
PIECES = 8
Write = tuple[int, bytes]
"""A write that reached the system: the client's port, and the bytes."""


class RecordedTransport:
    """A transport whose writes are noted."""

    def __init__(self, transport: asyncio.Transport, writes: list[Write]) -> None:
        self._transport = transport
        self._writes = writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write and note."""
        self._note(data)
        self._transport.write(data)

    def writelines(self, pieces: Sequence[bytes]) -> None:
        """Write all at once and note."""
        self._note(b"".join(pieces))
        self._transport.writelines(pieces)

    def _note(self, data: bytes) -> None:
        self._writes.append((self._transport.get_extra_info("peername")[1], data))


@asynccontextmanager
async def served(
    answer: Callable[[Scope, Send], Awaitable[None]], folder: Path
) -> AsyncIterator[tuple[int, list[Write]]]:
    """Serve ``answer`` as every server of weft does; yields the port and what was written."""
    writes: list[Write] = []
    limited: Any = protocol(Settings(data_dir=folder))

    class Recorded(limited):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(RecordedTransport(transport, writes))

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        await answer(scope, send)

    assert issubclass(Recorded, LimitedProtocol)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(app, http=Recorded, log_level=logging.ERROR, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1], writes
    finally:
        server.should_exit = server.force_exit = True
        await serving


class Client:
    """A connection that asks for paths."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.port = writer.get_extra_info("sockname")[1]

    def ask(self, path: str) -> None:
        """Send a request."""
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: weft\r\n\r\n".encode())

    async def head(self) -> bytes:
        """Return the head of the next answer."""
        return await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), DEADLINE)

    async def body(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        return await asyncio.wait_for(self._reader.readexactly(size), DEADLINE)

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


async def opened(port: int) -> Client:
    """Return a client of the server."""
    return Client(*await asyncio.open_connection("127.0.0.1", port))


def begin(size: int | None) -> Message:
    """Return the head of an answer of ``size`` bytes; None: of a stream."""
    headers = [] if size is None else [(b"content-length", str(size).encode())]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def piece(content: bytes, *, more: bool = False) -> Message:
    """Return a piece of an answer's body."""
    return {"type": "http.response.body", "body": content, "more_body": more}


async def test_an_answer_is_one_write(tmp_path: Path) -> None:
    """Two clients' answers, and two of one connection that asks again before it has the first."""

    async def answer(scope: Scope, send: Send) -> None:
        await send(begin(len(scope["raw_path"])))
        await send(piece(scope["raw_path"]))

    async with served(answer, tmp_path) as (port, writes):
        one, other = await opened(port), await opened(port)
        one.ask("/first")
        one.ask("/second")
        other.ask("/third")
        for client, path in ((one, b"/first"), (one, b"/second"), (other, b"/third")):
            assert (await client.head()).startswith(b"HTTP/1.1 200")
            assert await client.body(len(path)) == path
        told = [(client_port, data.rpartition(b"\r\n\r\n")[2]) for client_port, data in writes]
        assert sorted(told) == sorted([(one.port, b"/first"), (one.port, b"/second"), (other.port, b"/third")])
        one.close()
        other.close()


async def test_the_head_of_a_stream_does_not_wait_for_its_body(tmp_path: Path) -> None:
    """The body begins once the client has the head. Another client is answered meanwhile."""
    has_head = asyncio.Event()

    async def answer(scope: Scope, send: Send) -> None:
        if scope["path"] == "/stream":
            await send(begin(None))
            await has_head.wait()
        else:
            await send(begin(2))
        await send(piece(b"ok"))

    async with served(answer, tmp_path) as (port, _):
        streaming, other = await opened(port), await opened(port)
        streaming.ask("/stream")
        assert (await streaming.head()).startswith(b"HTTP/1.1 200")
        other.ask("/")
        await other.head()
        assert await other.body(2) == b"ok"
        has_head.set()
        assert await streaming.body(7) == b"2\r\nok\r\n"
        streaming.close()
        other.close()


async def test_pieces_of_a_body_are_not_gathered(tmp_path: Path) -> None:
    """Gathered, a large body would stand in memory a second time."""

    async def answer(_scope: Scope, send: Send) -> None:
        await send(begin(PIECE * PIECES))
        for number in range(PIECES):
            await send(piece(b"x" * PIECE, more=number < PIECES - 1))

    async with served(answer, tmp_path) as (port, writes):
        client = await opened(port)
        client.ask("/")
        await client.head()
        assert await client.body(PIECE * PIECES) == b"x" * PIECE * PIECES
        assert len(writes) == PIECES
        client.close()
