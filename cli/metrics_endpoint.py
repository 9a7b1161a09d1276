"""The metrics endpoint of a process: Prometheus metrics and health over HTTP while the process works."""

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
from workers.housekeeping.watch import watch_housekeeping


@asynccontextmanager
async def serve_metrics_and_health(
    telemetry: Telemetry, settings: Settings, database: Database, readiness: Readiness, *, reads_queue: bool
) -> AsyncIterator[None]:
    """Serve metrics and health inside the block, if the settings name a port. Send the last spans on leaving.

    ``reads_queue``: this process reports the depth of the whole queue, and housekeeping. Raises ``InvalidRequest``.
    """
    telemetry.metrics.watch_pool(database.engine.pool)
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
            housekeeping = watch_housekeeping(database, telemetry.metrics, stopping)
            tasks.append(asyncio.create_task(housekeeping, name="housekeeping metrics"))
    try:
        yield
    finally:
        stopping.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        if exposition is not None:
            await exposition.stop()
        await asyncio.to_thread(telemetry.traces.close)
