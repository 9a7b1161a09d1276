"""What a process looks at on a timer, for its metrics: the queue in the database, and its own event loop."""

import asyncio
import logging
from collections import deque
from time import monotonic
from typing import cast

from sqlalchemy import Table, func, literal_column, select

from tenants.database import Database
from tenants.models import Operation
from workers.telemetry.collectors import QueueState
from workers.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

QUEUE_SECONDS = 5.0
"""Time between two looks at the queue: scrapes themselves ask nothing of the database."""
LAG_SECONDS = 0.5
_LAGS_KEPT = 20

_operations = cast(Table, Operation.__table__)
_QUEUE = (
    select(
        _operations.c.kind,
        _operations.c.base_model,
        func.count().label("pending"),
        func.min(_operations.c.created_at).label("oldest"),
    )
    # Literal, so that the database can tell how few rows that is.
    .where(_operations.c.state == literal_column("'pending'"))
    .group_by(_operations.c.kind, _operations.c.base_model)
)


async def read_queue(database: Database) -> list[QueueState]:
    """Pending operations by kind and base model. Raises what the database raises."""
    async with database.read() as session:
        rows = (await session.execute(_QUEUE)).all()
    return [QueueState(row.kind, row.base_model, row.pending, row.oldest) for row in rows]


async def watch_queue(database: Database, metrics: Metrics, stopping: asyncio.Event) -> None:
    """Keep the queue's metrics true until ``stopping``. One process that all scrape is enough."""
    while True:
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                metrics.queue_read(await read_queue(database))
        except Exception as failure:  # noqa: BLE001 - the edge of a loop, which must go on
            metrics.queue_read(None)
            log.warning("the queue could not be read for its metrics: %s", failure)
        if await _set_within(stopping, QUEUE_SECONDS):
            return


async def watch_loop(metrics: Metrics, stopping: asyncio.Event) -> None:
    """Measure until ``stopping`` how late the event loop comes back to those who wait."""
    lags: deque[float] = deque(maxlen=_LAGS_KEPT)
    while True:
        began = monotonic()
        if await _set_within(stopping, LAG_SECONDS):
            return
        lags.append(max(0.0, monotonic() - began - LAG_SECONDS))
        metrics.loop_lagged(max(lags))


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
