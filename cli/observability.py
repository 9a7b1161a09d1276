"""A process that is observed: what to wrap around its work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledger.queue_depth import watch_queue
from store.database import Database
from store.settings import Settings
from telemetry.exposition import Exposition
from telemetry.loop_lag import watch_loop_lag
from telemetry.readiness import Readiness
from telemetry.telemetry import Telemetry


@asynccontextmanager
async def observed(
    telemetry: Telemetry, settings: Settings, database: Database, readiness: Readiness, *, reads_queue: bool
) -> AsyncIterator[None]:
    """Serve metrics and health meanwhile, if the settings say where; spans are sent to their end on leaving.

    ``reads_queue``: this process shows the whole queue's depth. Raises ``InvalidRequest``.
    """
    telemetry.metrics.watch_database(database.engine)
    stopping, tasks = asyncio.Event(), list[asyncio.Task[None]]()
    exposition = None
    if settings.metrics_port is not None:
        exposition = Exposition(
            telemetry.metrics.registry, readiness, host=settings.metrics_host, port=settings.metrics_port
        )
        await exposition.start()
        tasks.append(asyncio.create_task(watch_loop_lag(telemetry.metrics, stopping), name="loop lag"))
        if reads_queue:
            tasks.append(asyncio.create_task(watch_queue(database, telemetry.metrics, stopping), name="queue metrics"))
    try:
        yield
    finally:
        stopping.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        if exposition is not None:
            await exposition.stop()
        await asyncio.to_thread(telemetry.traces.close)
