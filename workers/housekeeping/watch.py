"""Reads the records of housekeeping's steps for the metrics. One process of the service is enough."""

import asyncio

from store.database import Database
from store.repeat import repeat
from telemetry.housekeeping import StepState
from telemetry.metrics import Metrics
from workers.housekeeping.records import read_records

_SECONDS = 15.0


async def watch_housekeeping(database: Database, metrics: Metrics, stopping: asyncio.Event) -> None:
    """Keep the metrics of housekeeping current until ``stopping``."""

    async def look() -> None:
        states = None
        try:
            async with asyncio.timeout(_SECONDS), database.read() as session:
                states = [
                    StepState(step, record.seconds, record.succeeded_at, record.behind_since, record.failing_since)
                    for step, record in (await read_records(session)).items()
                    if record is not None
                ]
        finally:
            metrics.housekeeping_read(states)

    await repeat(look, seconds=_SECONDS, stopping=stopping, failed="housekeeping could not be read for its metrics")
