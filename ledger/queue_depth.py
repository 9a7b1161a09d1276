"""Queue depth for the metrics: counts pending operations by kind and base model on a timer."""

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
"""Seconds between two queries. Scraping the metrics sends no query."""


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


# One query for each partial index. The indexes hold pending operations only.
_QUEUE = union_all(_pending(IS_SAMPLE), _pending(IS_TRAINING))


async def read_queue(database: Database) -> list[QueueState]:
    """Return the pending operations by kind and base model. Raises ``Unavailable``."""
    async with database.read() as session:
        rows = (await session.execute(_QUEUE)).all()
    return [QueueState(row.kind, row.base_model, row.pending, row.oldest) for row in rows]


async def watch_queue(database: Database, metrics: Metrics, stopping: asyncio.Event) -> None:
    """Keep the queue's metrics current until ``stopping``. One process of the service is enough."""

    async def look() -> None:
        depth = None
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                depth = await read_queue(database)
        finally:
            metrics.queue_read(depth)

    await repeat(look, seconds=QUEUE_SECONDS, stopping=stopping, failed="the queue could not be read for its metrics")
