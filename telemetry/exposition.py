"""HTTP server for ``/metrics``, ``/healthz`` and ``/readyz`` of any process, on a port apart from the tenants'."""

import asyncio
import gzip
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import orjson
import uvicorn
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from contracts.errors import InvalidRequest
from telemetry.readiness import Readiness

log = logging.getLogger(__name__)

KEPT_SECONDS = 1.0
"""Time for which the text of the metrics is kept."""

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the process around it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


@dataclass(frozen=True, slots=True)
class _Collected(Collector):
    """Metrics as they were read from their owners."""

    metrics: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self.metrics

    def text(self) -> tuple[bytes, bytes]:
        """Return Prometheus' text of the metrics, as it is and compressed."""
        text = generate_latest(self)
        return text, gzip.compress(text, compresslevel=1)


class _SharedText:
    """Text of a registry's metrics, made at most once in ``KEPT_SECONDS``, so that anonymous callers cost the process nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._texts = b"", b""
        self._kept_until = -1.0
        self._making = asyncio.Lock()

    async def look(self) -> tuple[bytes, bytes]:
        """Return the text, as it is and compressed. Those who ask at a time share one."""
        async with self._making:
            if monotonic() >= self._kept_until:
                # On the loop, where the owners change what is read; only what was read is written on a thread.
                collected = _Collected(list(self._registry.collect()))
                self._texts = await asyncio.to_thread(collected.text)
                self._kept_until = monotonic() + KEPT_SECONDS
            return self._texts


class Exposition:
    """A small HTTP server in the process's own event loop, so that a blocked loop is noticed."""

    def __init__(
        self,
        registry: CollectorRegistry,
        readiness: Readiness,
        *,
        host: str,
        port: int,
        http: type[asyncio.Protocol],
    ) -> None:
        """``port`` 0 takes a free port; after ``start`` the attribute ``port`` has it. ``http`` bounds the connections."""
        self._metrics = _SharedText(registry)
        self._http = http
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
            http=self._http,
            ws="none",
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

    async def answer(self, scope: _Scope, _receive: _Receive, send: _Send) -> None:
        """Answer one ASGI request."""
        match scope["path"]:
            case "/metrics":
                await self._tell_metrics(scope, send)
            case "/healthz":
                await _json(send, 200, {"status": "ok"})
            case "/readyz":
                verdict = await self._readiness.look()
                await _json(send, verdict.status, verdict.content())
            case _:
                await _json(send, 404, {"detail": "there are /metrics, /healthz and /readyz"})

    async def _tell_metrics(self, scope: _Scope, send: _Send) -> None:
        text, compressed = await self._metrics.look()
        headers = [(b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode())]
        if any(name == b"accept-encoding" and b"gzip" in value for name, value in scope["headers"]):
            text = compressed
            headers.append((b"content-encoding", b"gzip"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


async def _json(send: _Send, status: int, content: dict[str, object]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(content)})
