"""``weft doctor`` for services outside weft: vLLM servers and a collector of traces, if the settings name any."""

import asyncio
from importlib import import_module
from urllib.parse import urlsplit

from cli.finding import Finding
from contracts.errors import EngineFailure, InvalidRequest
from engine.sampling.vllm.http import VllmHttp
from store.settings import Settings
from workers.sampling.replica_sources import vllm_servers

_SECONDS = 3.0


def examine_services(settings: Settings) -> list[Finding]:
    """Check the services that the settings name and change nothing; return no finding when there are none."""
    try:
        urls = dict.fromkeys(server.url for server in vllm_servers(settings.vllm_urls))
    except InvalidRequest as error:
        return [Finding("vLLM servers", False, error.message), *_traces(settings)]
    return [*(asyncio.run(_server(url, settings.vllm_api_key)) for url in urls), *_traces(settings)]


async def _server(url: str, api_key: str | None) -> Finding:
    part = f"vLLM server {_shown(url)}"
    http = VllmHttp(part, url, api_key, max_streams=1)
    await http.open()
    try:
        answer = await http.get("/health", _SECONDS)
    except EngineFailure:
        told = "does not answer; start it as docs/how-to/add-vllm-servers.md says, or correct WEFT_VLLM_URLS"
        return Finding(part, False, told)
    finally:
        await http.close()
    if not answer.ok:
        told = f"answers /health with {answer.status}; look at its log, or correct WEFT_VLLM_URLS"
        return Finding(part, False, told)
    return Finding(part, True, "is healthy")


def _traces(settings: Settings) -> list[Finding]:
    if settings.otlp_endpoint is None:
        return []
    try:
        import_module("telemetry.otlp")
    except ImportError:
        told = "their libraries are not installed: `pip install 'weft[traces]'`, or unset WEFT_OTLP_ENDPOINT"
        return [Finding("traces", False, told)]
    return [Finding("traces", True, f"go to {_shown(settings.otlp_endpoint)}")]


def _shown(url: str) -> str:
    """Return the URL's host and port, without user name and password; a Unix socket's path."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path
