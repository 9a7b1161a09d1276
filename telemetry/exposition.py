"""HTTP server for ``/metrics``, ``/healthz`` and ``/readyz`` of any process, on a port apart from the tenants'."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import orjson
import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app

from contracts.errors import InvalidRequest
from telemetry.readiness import Readiness

log = logging.getLogger(__name__)

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the process around it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


class Exposition:
    """A small HTTP server in the process's own event loop, so that a blocked loop is noticed."""

    def __init__(self, registry: CollectorRegistry, readiness: Readiness, *, host: str, port: int) -> None:
        """``port`` 0 takes a free port; after ``start`` the attribute ``port`` has it."""
        self._metrics = make_asgi_app(registry)
        self._readiness = readiness
        self._host = host
        self.port = port
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to listen. Raises ``InvalidRequest`` if the port cannot be bound."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, self.port))
            listener.listen()
        except OSError as error:
            listener.close()
            raise InvalidRequest(
                f"cannot listen on {self._host}:{self.port} ({error.strerror}); set another WEFT_METRICS_PORT"
            ) from error
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self.answer,
            interface="asgi3",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="metrics")
        log.info("metrics on http://%s:%d/metrics", self._host, self.port)

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def answer(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answer one ASGI request."""
        match scope["path"]:
            case "/metrics":
                await self._metrics(scope, receive, send)
            case "/healthz":
                await _json(send, 200, {"status": "ok"})
            case "/readyz":
                verdict = await self._readiness.look()
                await _json(send, verdict.status, verdict.content())
            case _:
                await _json(send, 404, {"detail": "there are /metrics, /healthz and /readyz"})


async def _json(send: _Send, status: int, content: dict[str, object]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(content)})
