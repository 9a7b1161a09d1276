"""Stand-in for a vLLM server with scripted answers, such as a real server gives only when it is broken."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from contracts.base_model import BaseModelFacts
from engine.sampling.vllm.settings import VllmReplicaSettings

SERVED = "base"
Line = dict[str, Any] | str


def chunk(*tokens: int, finish: str | None = None, end: int | None = None, logprob: float | None = -1.5) -> Line:
    """One event with new tokens; with ``finish`` the last, which counts ``end`` tokens in all."""
    content = [
        {"token_id": token, "logprob": logprob, "top_logprobs": [{"token_id": token, "logprob": logprob}]}
        for token in tokens
    ]
    spans = None if end is None else [{"version": "default", "start": 0, "end": end}]
    choice = {"index": 0, "finish_reason": finish, "token_ids": tokens, "logprobs": {"content": content}}
    return {"request_id": "generate-tokens-x", "choices": [choice | {"weight_versions": spans}]}


GOOD: tuple[Line, ...] = (chunk(1), chunk(2, 3, finish="length", end=3), "[DONE]")


class ScriptedServer:
    """Change the fields between requests."""

    def __init__(self) -> None:
        self.base_url = ""
        self.lines: tuple[Line, ...] = GOOD
        self.late_prompt: list[int] = []
        self.late_lines: tuple[Line, ...] = ()
        """Lines for ``late_prompt`` instead of the last of ``lines``, sent once ``may_end`` is set."""
        self.may_end = asyncio.Event()
        self.endless_prompt: list[int] = []
        """Prompt whose stream brings token after token until the client closes it."""
        self.warm_lines: tuple[Line, ...] = (WARM, "[DONE]")
        """Lines for warm-up requests."""
        self.status = 200
        self.piece = 10**6
        """Bytes sent at once."""
        self.hangs = False
        """True to keep streams open after ``lines`` until the client closes them."""
        self.prompt_logprobs: Any = [None, {"1": {"logprob": -1.0}}]
        self.loaded: list[str] = []
        self.unloads = 0
        self.may_unload = asyncio.Event()
        """Unloads are answered while it is set."""
        self.may_unload.set()
        self.may_load = asyncio.Event()
        """Loads are answered while it is set."""
        self.may_load.set()
        self.load_answers: list[int] = []
        """Statuses of the next loads; 200 when there are none."""
        self.models: list[dict[str, Any]] = [{"id": SERVED, "root": "/base", "max_model_len": 64}]
        self.aborted: list[list[str]] = []
        self.left = asyncio.Event()
        """Set when a client left a stream that hangs."""
        self.bodies: list[Any] = []
        self._asked = asyncio.Event()
        self.operated: list[str] = []
        """Sleeps and wake-ups."""
        self.operate_answers: list[int] = []
        """Statuses of the next of them; 200 when there are none."""
        self.sleeps = False
        self.version: str | None = "0.32.0"
        """Answer of ``/version``; None: not found."""
        self.config: dict[str, Any] | None = None
        """Answer of ``/server_info``; None: not in development mode."""

    def asked(self, prompt: list[int]) -> int:
        """Return the number of requests for tokens of ``prompt``."""
        return sum(body["token_ids"] == prompt for body in self.bodies)

    async def until_asked(self, prompt: list[int], count: int) -> None:
        """Wait for ``count`` requests for tokens of ``prompt``."""
        async with asyncio.timeout(60):
            while self.asked(prompt) < count:
                self._asked.clear()
                await self._asked.wait()

    async def until_loads(self, count: int) -> None:
        """Wait for ``count`` requests to load."""
        async with asyncio.timeout(60):
            while len(self.loaded) < count:
                self._asked.clear()
                await self._asked.wait()

    async def until_unloads(self, count: int) -> None:
        """Wait for ``count`` requests to unload."""
        async with asyncio.timeout(60):
            while self.unloads < count:
                self._asked.clear()
                await self._asked.wait()

    def app(self) -> web.Application:
        routes: list[tuple[str, str, Callable[[web.Request], Any]]] = [
            ("GET", "/health", self._health),
            ("GET", "/v1/models", self._models),
            ("GET", "/server_info", self._info),
            ("GET", "/version", self._version),
            ("GET", "/is_sleeping", self._is_sleeping),
            ("POST", "/sleep", self._operate),
            ("POST", "/wake_up", self._operate),
            ("POST", "/v1/load_lora_adapter", self._load),
            ("POST", "/v1/unload_lora_adapter", self._unload),
            ("POST", "/inference/v1/generate", self._generate),
            ("POST", "/inference/v1/abort_requests", self._abort),
        ]
        app = web.Application()
        app.add_routes([web.route(method, path, handler) for method, path, handler in routes])
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": self.models})

    async def _operate(self, request: web.Request) -> web.Response:
        self.operated.append(request.path)
        self.sleeps = request.path == "/sleep"
        return web.Response(status=self.operate_answers.pop(0) if self.operate_answers else 200)

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.sleeps})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"vllm_config": self.config}, status=404 if self.config is None else 200)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version}, status=404 if self.version is None else 200)

    async def _unload(self, request: web.Request) -> web.Response:
        self.unloads += 1
        self._asked.set()
        await self.may_unload.wait()
        return web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        self.loaded.append((await request.json())["lora_name"])
        self._asked.set()
        await self.may_load.wait()
        return web.Response(status=self.load_answers.pop(0) if self.load_answers else 200)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["request_ids"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self._asked.set()
        is_warm_up = body["token_ids"] == [0, 0]
        if self.status != 200:
            return web.json_response({"error": {"message": "scripted", "code": self.status}}, status=self.status)
        if not body["stream"]:
            scores = [None, {"0": {"logprob": -1.0}, "1": {"logprob": -2.0}}] if is_warm_up else self.prompt_logprobs
            return web.json_response({"prompt_logprobs": scores})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while body["token_ids"] == self.endless_prompt:
            await response.write(b"data: " + _text(chunk(1)) + b"\n\n")
            await asyncio.sleep(0.05)
        is_late = body["token_ids"] == self.late_prompt
        lines = self.warm_lines if is_warm_up else self.lines[:-1] if is_late else self.lines
        data = b"".join(b"data: " + _text(line) + b"\n\n" for line in lines)
        for start in range(0, len(data), self.piece):
            await response.write(data[start : start + self.piece])
        if is_late:
            await self.may_end.wait()
            await response.write(b"".join(b"data: " + _text(line) + b"\n\n" for line in self.late_lines))
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        return response


def _text(line: Line) -> bytes:
    return line.encode() if isinstance(line, str) else json.dumps(line).encode()


def _warm() -> Line:
    line: Any = chunk(1, finish="length", end=1)
    line["choices"][0]["logprobs"]["content"][0]["top_logprobs"].append({"token_id": 2, "logprob": -2.0})
    return line


WARM = _warm()


@asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    """Start a server on a free port of this machine."""
    server = ScriptedServer()
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def scripted_settings(server: ScriptedServer, base: BaseModelFacts, folder: Path) -> VllmReplicaSettings:
    """Return the settings of a replica over ``server``, for a short context and few adapters."""
    return VllmReplicaSettings(
        name="scripted",
        base_url=server.base_url + "/",
        served_model=SERVED,
        base=replace(base, context_length=64),
        zero_adapter=folder / "zero",
        max_lora_rank=8,
        max_loras=4,
        max_resident=4,
        cut_deadline_s=3.0,
    )
