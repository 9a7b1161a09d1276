"""A proxy that drops answers: it sends each POST on at once, and tells the client nothing the first times that it comes.

A client that repeats its request until it is answered has it arrive up to three times.
"""

import asyncio
import hashlib
import socket
from collections import Counter
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web

_DROPS = ("/forward_backward", "/asample")
MOST_TIMES = 3
"""Most times that a request comes before its answer is let through."""


class DroppingProxy:
    """A proxy on a free loopback port, in the running event loop. Use as an async context manager."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._seen: Counter[bytes] = Counter()
        self._late: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.dropped = 0

    @property
    def base_url(self) -> str:
        """URL at which the proxy listens."""
        return f"http://127.0.0.1:{self.port}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path.endswith(_DROPS):
            key = hashlib.blake2b(request.path.encode() + body).digest()
            self._seen[key] += 1
            # By the content, so that requests come once, twice and three times.
            if self._seen[key] < 1 + key[0] % MOST_TIMES:
                self.dropped += 1
                late = asyncio.create_task(self._send_late(request, body))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
                if request.transport is not None:
                    request.transport.abort()
                raise web.HTTPBadGateway
        try:
            status, content = await self._send(request, body)
        except aiohttp.ClientError:
            # The API that had it was killed. The client sends it again.
            raise web.HTTPBadGateway from None
        return web.Response(body=content, status=status, content_type="application/json")

    async def _send_late(self, request: web.Request, body: bytes) -> None:
        """Send a request whose answer is dropped. It may arrive after its repeat."""
        try:
            await self._send(request, body)
        except aiohttp.ClientError:
            # The API that had it was killed: as lost as its answer.
            return

    async def _send(self, request: web.Request, body: bytes) -> tuple[int, bytes]:
        if self._http is None:
            raise RuntimeError("the proxy is not open")
        headers = {name: request.headers[name] for name in ("X-API-Key", "Content-Type") if name in request.headers}
        url = self._target + request.path_qs
        async with self._http.request(request.method, url, data=body, headers=headers) as answer:
            return answer.status, await answer.read()

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._late:
            await asyncio.wait(self._late, timeout=60)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._http is not None:
            await self._http.close()
