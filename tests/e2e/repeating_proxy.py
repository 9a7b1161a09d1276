"""A real HTTP proxy that sends every POST to weft twice, both at once, and checks that both answers agree.

Or one that loses the first answer to each POST of some endpoints, so that the client has to send it again.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

POLLS = ("/retrieve_future", "/session_heartbeat", "/telemetry")
_PASSED_ON = (
    "content-type",
    "content-encoding",
    "accept",
    "x-api-key",
    "user-agent",
    "x-idempotency-key",
    "idempotency-key",
)

_HANDED_BACK = ("location", "expires")


class _Lost(Response):
    """An answer that never comes whole: the connection ends after its headers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin, and end the connection."""
        await send({"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"1000")]})


class RepeatingProxy:
    """Runs in a thread of the test process. ``disagreements`` lists repeats that were answered otherwise.

    With ``loses``, ends of paths, nothing is repeated. ``lost`` counts the answers that were lost.
    """

    def __init__(self, target: str, *, loses: tuple[str, ...] = ()) -> None:
        self._target = target
        self._loses = loses
        self._seen: set[tuple[str, bytes, str | None]] = set()
        self.lost = 0
        self.repeated = 0
        self.disagreements: list[str] = []
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        routes = [Route("/{path:path}", self._handle, methods=["GET", "POST", "PUT", "DELETE"])]
        app = Starlette(routes=routes, lifespan=self._connected)
        config = uvicorn.Config(
            app, log_level="error", loop="asyncio", timeout_graceful_shutdown=5, timeout_keep_alive=75
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._client: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def _connected(self, _app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=500)
        async with httpx.AsyncClient(base_url=self._target, timeout=60, limits=limits) as client:
            self._client = client
            yield

    @property
    def base_url(self) -> str:
        """URL at which the proxy listens."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    async def _handle(self, request: Request) -> Response:
        body = await request.body()
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        headers |= {name: value for name, value in request.headers.items() if name.startswith("x-stainless")}
        url = request.url.path + (f"?{request.url.query}" if request.url.query else "")

        async def send() -> httpx.Response:
            assert self._client is not None
            return await self._client.request(request.method, url, content=body, headers=headers)

        if self._loses:
            answer = await send()
            seen = (url, body, request.headers.get("idempotency-key"))
            if request.method == "POST" and request.url.path.endswith(self._loses) and seen not in self._seen:
                self._seen.add(seen)
                self.lost += 1
                return _Lost()
        elif request.method != "POST" or request.url.path.endswith(POLLS):
            answer = await send()
        else:
            answer, again = await asyncio.gather(send(), send())
            self.repeated += 1
            if (answer.status_code, answer.content) != (again.status_code, again.content):
                self.disagreements.append(f"{request.url.path}: {answer.text[:200]} / {again.text[:200]}")
        kept = {"content-type": answer.headers.get("content-type", "application/json")}
        kept |= {name: answer.headers[name] for name in _HANDED_BACK if name in answer.headers}
        return Response(answer.content, status_code=answer.status_code, headers=kept)

    def __enter__(self) -> Self:
        self._listener.listen(512)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)
