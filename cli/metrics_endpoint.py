"""The metrics endpoint of a process: Prometheus metrics and health over HTTP while the process works."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from cli.http_protocol import protocol
from ledger.queue_depth import watch_queue
from store.clock import utc_now
from store.database import Database
from store.settings import Settings
from telemetry.exposition import Exposition
from telemetry.loop_lag import watch_loop_lag
from telemetry.readiness import Readiness
from telemetry.telemetry import Telemetry
from workers.housekeeping.watch import watch_housekeeping

_MOST_CONNECTIONS = 64
"""Connections at a time. A scraper and a probe have one each; strangers may ask here without a key."""
_HEADER_TIMEOUT, _SEND_TIMEOUT = timedelta(seconds=5), timedelta(seconds=10)


def exposition_at(port: int, telemetry: Telemetry, settings: Settings, readiness: Readiness) -> Exposition:
    """Return the endpoint's server for ``port``, with the API's bounds of connections and smaller limits."""
    limits = settings.model_copy(
        update={
            "max_connections": min(settings.max_connections, _MOST_CONNECTIONS),
            "header_timeout": min(settings.header_timeout, _HEADER_TIMEOUT),
            "send_timeout": min(settings.send_timeout, _SEND_TIMEOUT),
        }
    )
    return Exposition(
        telemetry.metrics.registry, readiness, host=settings.metrics_host, port=port, http=protocol(limits)
    )


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
        exposition = exposition_at(settings.metrics_port, telemetry, settings, readiness)
        await exposition.start()
        tasks.append(asyncio.create_task(watch_loop_lag(telemetry.metrics, stopping), name="loop lag"))
        if reads_queue:
            queue = watch_queue(database, telemetry.metrics, utc_now, stopping)
            tasks.append(asyncio.create_task(queue, name="queue metrics"))
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
