"""What a process looks at on a timer, for its metrics: the queue in the database, and its own event loop."""

import asyncio
import logging
from collections import deque
from time import monotonic
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select, union_all

from ledger.statements import IS_PENDING, IS_SAMPLE, IS_TRAINING, operations
from store.database import Database
from telemetry.collectors import QueueState
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

QUEUE_SECONDS = 5.0
"""Time between two looks at the queue: scrapes themselves ask nothing of the database."""
LAG_SECONDS = 0.5
_LAGS_KEPT = 20


def _pending(kinds: ColumnElement[bool]) -> Select[Any]:
    return (
        select(
            operations.c.kind,
            operations.c.base_model,
            func.count().label("pending"),
            func.min(operations.c.created_at).label("oldest"),
        )
        .where(IS_PENDING, kinds)
        .group_by(operations.c.kind, operations.c.base_model)
    )


# One for each of the partial indexes: those hold what is pending, and nothing of what is done.
_QUEUE = union_all(_pending(IS_SAMPLE), _pending(IS_TRAINING))


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
