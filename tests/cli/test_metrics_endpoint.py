"""The metrics endpoint around a process's work: it answers inside the block and holds up no shutdown."""

import asyncio
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from cli.metrics_endpoint import exposition_at, serve_metrics_and_health
from store.clock import utc_now
from store.database import Database, create_engine
from store.settings import Settings
from telemetry.readiness import Readiness
from telemetry.telemetry import Telemetry

DEADLINE = 90.0


@pytest.mark.parametrize("reads_queue", [True, False])
async def test_leaving_ends_every_watch(migrated_database: Path, reads_queue: bool) -> None:
    database = Database(create_engine(f"sqlite+aiosqlite:///{migrated_database}"))
    settings = Settings(metrics_port=0)
    async with asyncio.timeout(DEADLINE):
        async with serve_metrics_and_health(
            Telemetry.of("test", utc_now), settings, database, Readiness(), reads_queue=reads_queue
        ):
            running = {task.get_name() for task in asyncio.all_tasks()}
            assert ("queue metrics" in running) == reads_queue
        left = {task.get_name() for task in asyncio.all_tasks()}
    assert left.isdisjoint({"queue metrics", "loop lag"})
    await database.close()


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half a header"])
async def test_strangers_with_many_connections_end_in_time_and_keep_no_probe_out(sent: bytes) -> None:
    telemetry = Telemetry.of("test", utc_now)
    # The endpoint's own bounds are smaller than what the API may be given.
    settings = Settings(max_connections=16384, header_timeout=timedelta(hours=1))
    exposition = exposition_at(0, telemetry, settings, Readiness())
    await exposition.start()
    strangers = [await asyncio.open_connection("127.0.0.1", exposition.port) for _ in range(200)]
    for _, writer in strangers:
        writer.write(sent)

    async def until_ended(reader: asyncio.StreamReader) -> None:
        try:
            await reader.read()
        except ConnectionError:
            return

    ended = [asyncio.create_task(until_ended(reader)) for reader, _ in strangers]
    async with asyncio.timeout(DEADLINE), httpx.AsyncClient(base_url=f"http://127.0.0.1:{exposition.port}") as probe:
        # Those beyond the most end at once, the others at their deadline.
        while sum(one.done() for one in ended) < 200 - 64:
            assert (await probe.get("/healthz", timeout=DEADLINE)).status_code == 200
        await asyncio.gather(*ended)
        assert (await probe.get("/metrics", timeout=DEADLINE)).status_code == 200
    for _, writer in strangers:
        writer.close()
    await exposition.stop()


def test_a_process_without_the_api_serves_metrics_without_its_framework() -> None:
    code = "import cli.metrics_endpoint, sys; print('fastapi' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
