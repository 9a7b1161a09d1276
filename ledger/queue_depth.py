"""The ledger's queue depth: what is pending, by kind and base model, read on a timer for the metrics."""

import asyncio
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select, union_all

from ledger.statements import operations
from store.database import Database
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.repeat import repeat
from telemetry.collectors import QueueState
from telemetry.metrics import Metrics

QUEUE_SECONDS = 5.0
"""Seconds between two reads; scrapes themselves ask nothing of the database."""


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
    """Keep the queue's metrics current until ``stopping``. One process that all scrape is enough."""

    async def look() -> None:
        depth = None
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                depth = await read_queue(database)
        finally:
            metrics.queue_read(depth)

    await repeat(look, seconds=QUEUE_SECONDS, stopping=stopping, failed="the queue could not be read for its metrics")
