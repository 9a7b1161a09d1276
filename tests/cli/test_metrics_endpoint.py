"""The metrics endpoint around a process's work: it answers inside the block and holds up no shutdown."""

import asyncio
from pathlib import Path

import pytest

from cli.metrics_endpoint import serve_metrics_and_health
from store.clock import utc_now
from store.database import Database, create_engine
from store.settings import Settings
from telemetry.readiness import Readiness
from telemetry.telemetry import Telemetry

DEADLINE = 30.0


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
