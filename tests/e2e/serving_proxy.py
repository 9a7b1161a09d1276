"""A proxy before a vLLM server that refuses to load adapters while a test says so; everything else passes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from engine.sampling.vllm.adapters import LOAD
from engine.sampling.vllm.http import open_session, request_url

_HOP_BY_HOP = {"content-length", "transfer-encoding", "connection", "content-encoding"}


class ServingProxy:
    """Change ``refuses`` at any time."""

    def __init__(self, server_url: str) -> None:
        self.base_url = ""
        self.refuses = False
        """True while loads of adapters are answered 500."""
        self._server_url = server_url
        self._end = asyncio.Event()

    async def serve(self, ready: threading.Event) -> None:
        """Serve until ``end``."""
        self._session = open_session(self._server_url, 0, 15.0)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._end.wait()
        await runner.cleanup()
        await self._session.close()

    def end(self) -> None:
        """End ``serve``, from its event loop."""
        self._end.set()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        if self.refuses and request.path == LOAD:
            return web.json_response({"error": {"message": "refused by the test", "code": 500}}, status=500)
        url = request_url(self._server_url) + request.path_qs
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.request(request.method, url, data=content or None, headers=headers) as answer:
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            # A replica that closes its connection wants no more.
            with suppress(ConnectionResetError):
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
            return response


@contextmanager
def serving_proxy(server_url: str) -> Iterator[ServingProxy]:
    """Run a proxy in a thread of its own."""
    loop = asyncio.new_event_loop()
    proxy, ready = ServingProxy(server_url), threading.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(proxy.serve(ready),))
    thread.start()
    try:
        assert ready.wait(30)
        yield proxy
    finally:
        loop.call_soon_threadsafe(proxy.end)
        thread.join()
        loop.close()
