"""Attacks by connections: slow ones, ones that read nothing, odd headers, wrong keys (A7 to A9, A11, A13)."""

import asyncio
import socket
from contextlib import suppress

import orjson

from bench.hostile.foothold import PREFIX, Foothold, again_and_again

_SLOW = 100
"""Slow connections of each kind."""
_DRIBBLE_SECONDS = 0.5
_UNREAD = 48
_UNREAD_SECONDS = 60
_CONNECTIONS = 32
_PIECE = 65_536
_DIGITS = "9" * 5000
_LONG = 2000


async def slow_strangers(foothold: Foothold) -> None:
    """Hold connections without a key: silent, with half a header, with headers or a body byte by byte (A7)."""
    head = foothold.head("POST", f"{PREFIX}/telemetry", with_key=False)
    kinds = [
        (b"", b""),
        (b"", b"\r\n"),
        (head, b"a: b\r\n"),
        (head + b"Content-Length: 1000000\r\n\r\n", b"x"),
    ]

    async def hold(number: int) -> None:
        await _dribble(foothold, *kinds[number % len(kinds)])

    await again_and_again(_SLOW, hold)


async def large_heads(foothold: Foothold) -> None:
    """Send heads, addresses, trailers and framing without end, and without a key (A7)."""
    head = foothold.head("GET", "/healthz", with_key=False)
    chunked = foothold.head("POST", "/healthz", "Transfer-Encoding: chunked", with_key=False) + b"\r\n"
    line = b"a" * _PIECE
    kinds = [
        (head + b"X-A: ", line),
        (b"GET /healthz?", line),
        (head, b"a:b\r\n" * 10_000),
        (chunked + b"0\r\n", b"a:b\r\n" * 10_000),
        (chunked, b"1\r\nx\r\n" * 10_000),
    ]

    async def flood(number: int) -> None:
        head, piece = kinds[number % len(kinds)]
        _, writer = await foothold.connect()
        try:
            writer.write(head)
            while not writer.is_closing():
                writer.write(piece)
                await writer.drain()
        finally:
            writer.transport.abort()

    await again_and_again(len(kinds), flood)


async def slow_bodies(foothold: Foothold) -> None:
    """Hold connections with a key, whose large bodies come byte by byte, or end in the middle (A7)."""
    announced = foothold.head("POST", f"{PREFIX}/forward_backward", "Content-Length: 60000000")
    chunked = foothold.head("POST", f"{PREFIX}/asample", "Transfer-Encoding: chunked")
    short = foothold.head("POST", f"{PREFIX}/session_heartbeat", "Content-Length: 60000")
    kinds = [(announced + b"\r\n", b"x"), (chunked + b"\r\n", b"1\r\nx\r\n"), (short + b"\r\n", b"x")]

    async def hold(number: int) -> None:
        await _dribble(foothold, *kinds[number % len(kinds)])

    await again_and_again(_SLOW, hold)


async def unread_answers(foothold: Foothold) -> None:
    """Ask for streams, chats, lists and downloads, and read none of it (A6, A7)."""
    run = await foothold.run()
    path = await foothold.checkpoint(run)
    sampler = await foothold.sampler(path)
    archive = f"{PREFIX}/training_runs/{run}/checkpoints/sampler_weights/v1/archive"
    place = await _place_of(foothold, archive)

    async def ask(number: int) -> None:
        sample = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "num_samples": 8,
            "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": _LONG},
        }
        chat = {"model": foothold.base_model, "messages": [{"role": "user", "content": "a"}], "stream": True, "n": 8}
        match number % 4:
            case 0:
                await _unread(foothold, _post(foothold, f"{PREFIX}/stream_sample", sample))
            case 1:
                await _unread(foothold, _post(foothold, "/v1/chat/completions", chat))
            case 2:
                await _unread(foothold, foothold.head("GET", place, with_key=False) + b"\r\n")
            case _:
                # Hundreds of requests in one connection, whose answers nobody takes.
                await _unread(foothold, (foothold.head("GET", f"{PREFIX}/checkpoints?limit=1000") + b"\r\n") * 400)

    await again_and_again(_UNREAD, ask)


async def odd_headers(foothold: Foothold) -> None:
    """Send versions of 5,000 digits, NULs, strange hosts, numbers without end and ids of nobody (A9, A11)."""
    run = await foothold.run()
    bearer = {"X-API-Key": "", "Authorization": f"Bearer {foothold.key}"}
    asked: list[tuple[str, str, bytes | None, dict[str, str]]] = [
        ("GET", "auth/apikey/me", None, bearer),
        ("GET", "checkpoints", None, {"X-Stainless-Package-Version": f"{_DIGITS}.{_DIGITS}"}),
        ("POST", f"adapters/{run}/pause", b'{"reason":"a\\u0000b","timeout_seconds":0}', {}),
        ("POST", f"adapters/{run}/resume", b'{"generation":' + _DIGITS.encode() + b"}", {}),
        ("GET", f"sessions?limit={_DIGITS}&offset=-{_DIGITS}", None, {}),
        ("GET", "training_runs/%00", None, {}),
        ("GET", f"training_runs/{run}", None, {"Host": "elsewhere.example"}),
        ("GET", "sessions/" + "x" * 4000, None, {}),
        ("POST", "retrieve_future", b'{"request_id":"\\ud800"}', {}),
        ("POST", "forward_backward", b"\xff" * 1000, {"Content-Type": "application/x-protobuf"}),
        ("POST", "asample", b"[]", {"Content-Encoding": "br"}),
    ]

    async def send(number: int) -> None:
        method, endpoint, body, headers = asked[number % len(asked)]
        await foothold.send(method, f"{PREFIX}/{endpoint}", body, headers)

    await again_and_again(_CONNECTIONS, send)


async def wrong_keys(foothold: Foothold) -> None:
    """Try keys that do not exist, and secrets of downloads (A13)."""

    async def send(number: int) -> None:
        if number % 2:
            await foothold.send("GET", f"{PREFIX}/sessions", None, {"X-API-Key": f"tml-{number:040d}"})
        else:
            await foothold.send("GET", f"{PREFIX}/downloads/{number:040d}/archive.tar")

    await again_and_again(_CONNECTIONS, send)


async def _dribble(foothold: Foothold, head: bytes, every: bytes) -> None:
    """Send ``head`` at once and ``every`` again and again, until the service ends the connection."""
    reader, writer = await foothold.connect()
    try:
        writer.write(head)
        while not reader.at_eof():
            with suppress(TimeoutError):
                async with asyncio.timeout(_DRIBBLE_SECONDS):
                    await reader.read(4096)
            writer.write(every)
    finally:
        writer.close()


async def _unread(foothold: Foothold, request: bytes) -> None:
    """Send a request, read nothing, and hold the connection until the service ends it."""
    _, writer = await foothold.connect()
    # The transport reads by itself otherwise.
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    try:
        writer.write(request)
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNREAD_SECONDS):
                await writer.wait_closed()
    finally:
        writer.transport.abort()


def _post(foothold: Foothold, path: str, body: dict[str, object]) -> bytes:
    content = orjson.dumps(body)
    head = foothold.head("POST", path, "Content-Type: application/json", f"Content-Length: {len(content)}")
    return head + b"\r\n" + content


async def _place_of(foothold: Foothold, archive: str) -> str:
    """Return the path of the link that a download redirects to."""
    headers = {"X-API-Key": foothold.key}
    async with foothold.http.get(foothold.base_url + archive, headers=headers, allow_redirects=False) as answer:
        return answer.headers["Location"].removeprefix(foothold.base_url)
