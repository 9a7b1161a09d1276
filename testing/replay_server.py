"""A replay server: it forwards each request to a real service once and repeats that answer from then on.

``python -m testing.replay_server --upstream URL`` prints its own address. A call of the SDK against it takes the time of the
client and of HTTP alone, which is the floor for any service that speaks the same wire.
"""

import argparse
import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_NOT_FORWARDED = frozenset({b"host", b"content-length", b"connection", b"accept-encoding"})
_UPSTREAM_SECONDS = 120.0
_OK = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """A response that is repeated."""

    status: int
    content_type: bytes
    body: bytes


class ReplayApp:
    """ASGI app over ``upstream`` that keeps one answer for each route, and for ``retrieve_future`` one for each body.

    Only successes are kept, so a poll that came too early is forwarded again.
    """

    def __init__(self, upstream: httpx.AsyncClient) -> None:
        self._upstream = upstream
        self._answers: dict[tuple[str, bytes, bytes], Answer] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ``httpx.HTTPError`` when the upstream cannot be asked."""
        body = await _read(receive)
        path: bytes = scope["raw_path"] + b"?" + scope["query_string"]
        key = (scope["method"], path, body if b"/retrieve_future" in path else b"")
        answer = self._answers.get(key)
        if answer is None:
            answer = await self._ask(scope, path, body)
            if answer.status == _OK:
                self._answers[key] = answer
        headers = [(b"content-type", answer.content_type), (b"content-length", str(len(answer.body)).encode())]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _ask(self, scope: Scope, path: bytes, body: bytes) -> Answer:
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_FORWARDED]
        response = await self._upstream.request(scope["method"], path.decode(), headers=headers, content=body)
        return Answer(response.status_code, response.headers.get("content-type", "").encode(), response.content)


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class _Server(uvicorn.Server):
    """A uvicorn server that prints its address once it listens."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then print the address."""
        await super().startup(sockets)
        print(f"http://127.0.0.1:{self._listener.getsockname()[1]}", flush=True)


async def _serve(upstream: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # asyncio sets TCP_NODELAY only on sockets that name their protocol. Without it an answer waits for the delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with httpx.AsyncClient(base_url=upstream, timeout=_UPSTREAM_SECONDS) as client:
            config = uvicorn.Config(ReplayApp(client), lifespan="off", access_log=False, log_level="warning")
            await _Server(config, listener).serve([listener])


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", required=True, help="base URL of the service to ask the first time")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(_serve(options.upstream))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
