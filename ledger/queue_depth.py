"""Queue depth for the metrics: counts pending operations by kind and base model on a timer.

Work is held on purpose, for days even, where its tenant is suspended, a budget is spent, a rate is used up or a gate is closed:
such work is counted apart, and its age tells nothing.
"""

import asyncio
from typing import Any

from sqlalchemy import ColumnElement, Double, Select, bindparam, func, or_, select, union_all

from ledger.statements import operations, tenants
from store.clock import Clock
from store.database import Database
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.repeat import repeat
from telemetry.collectors import QueueState
from telemetry.metrics import Metrics
from tenants.budgets import budget_keys, is_spent_for
from tenants.rate_lines import is_held
from tenants.rates import Meter, is_paced, rate_joined, rates

QUEUE_SECONDS = 5.0
"""Seconds between two queries. Scraping the metrics sends no query."""
_AT = bindparam("at", type_=Double)


def _pending(kinds: ColumnElement[bool], meter: Meter, cost: ColumnElement[int]) -> Select[Any]:
    suspended = select(tenants.c.id).where(tenants.c.suspended_at.is_not(None))
    on_purpose = or_(
        operations.c.held_by.is_not(None),
        operations.c.tenant_id.in_(suspended),
        func.coalesce(is_paced(operations.c.rate_mark, cost, _AT), False),
        is_spent_for(operations.c.tenant_id, operations.c.key_id, operations.c.lane),
        is_held(operations.c.id, _AT),
    )
    return (
        select(
            operations.c.kind,
            operations.c.base_model,
            func.count().label("pending"),
            func.count().filter(on_purpose).label("held"),
            func.min(operations.c.created_at).filter(~on_purpose).label("oldest"),
        )
        .select_from(operations.outerjoin(rates, rate_joined(operations.c.tenant_id, meter)))
        .where(IS_PENDING, kinds)
        .group_by(operations.c.kind, operations.c.base_model)
    )


# One query for each partial index. The indexes hold pending operations only.
_QUEUE = union_all(
    _pending(IS_SAMPLE, Meter.SAMPLE, operations.c.reserved_tokens),
    _pending(IS_TRAINING, Meter.TRAIN, operations.c.tokens),
)


async def read_queue(database: Database, clock: Clock) -> list[QueueState]:
    """Return the pending operations by kind and base model. Raises ``Unavailable``."""
    now = clock()
    async with database.read() as session:
        rows = (await session.execute(_QUEUE, {"at": now.timestamp(), **budget_keys(now)})).all()
    return [QueueState(row.kind, row.base_model, row.pending, row.held, row.oldest) for row in rows]


async def watch_queue(database: Database, metrics: Metrics, clock: Clock, stopping: asyncio.Event) -> None:
    """Keep the queue's metrics current until ``stopping``. One process of the service is enough."""

    async def look() -> None:
        depth = None
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                depth = await read_queue(database, clock)
        finally:
            metrics.queue_read(depth)

    await repeat(look, seconds=QUEUE_SECONDS, stopping=stopping, failed="the queue could not be read for its metrics")
