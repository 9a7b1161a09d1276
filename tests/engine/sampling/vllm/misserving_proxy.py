"""A proxy before a real vLLM server that misserves one kind of projection: a loaded adapter lacks its matrix B there."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web
from safetensors.numpy import load_file, save_file

from engine.sampling.vllm.adapters import LOAD
from engine.sampling.vllm.http import open_session, request_url

_HOP_BY_HOP = {"content-length", "transfer-encoding", "connection", "content-encoding"}


@asynccontextmanager
async def misserving_proxy(server_url: str, projection: str, folder: Path) -> AsyncIterator[str]:
    """Yield the URL of a proxy whose adapters have zeros at ``projection``, in copies under ``folder``."""
    session = open_session(server_url, 0, 15.0)

    async def forward(request: web.Request) -> web.StreamResponse:
        content = await request.read()
        if request.path == LOAD:
            asked = await request.json()
            path = _without(Path(asked["lora_path"]), projection, folder)
            content = web.json_response({**asked, "lora_path": str(path)}).body
        url = request_url(server_url) + request.path_qs
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with session.request(request.method, url, data=content or None, headers=headers) as answer:
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            # A replica that closes its connection wants no more.
            with suppress(ConnectionResetError):
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
            return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
        await session.close()


def _without(adapter: Path, projection: str, folder: Path) -> Path:
    copy = folder / adapter.name
    if not copy.exists():
        shutil.copytree(adapter, copy)
        weights = copy / "adapter_model.safetensors"
        tensors = load_file(weights)
        for name in tensors:
            if f".{projection}.lora_B." in name:
                tensors[name] = 0 * tensors[name]
        save_file(tensors, weights, {"format": "pt"})
    return copy
