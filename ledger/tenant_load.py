"""Load of the service by tenants, for operators: who fills the queue, and who was served of late."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from ledger.statements import operations
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING


@dataclass(frozen=True, slots=True)
class QueuePart:
    """Pending operations of one tenant, kind and base model. ``tokens``: of training data, or what samples may take."""

    base_model: str
    kind: str
    tenant_id: str
    pending: int
    tokens: int
    oldest: datetime


def _pending(kinds: ColumnElement[bool], tokens: ColumnElement[Any]) -> Select[Any]:
    return (
        select(
            operations.c.base_model,
            operations.c.kind,
            operations.c.tenant_id,
            func.count().label("pending"),
            func.sum(tokens).label("tokens"),
            func.min(operations.c.created_at).label("oldest"),
        )
        .where(IS_PENDING, kinds)
        .group_by(operations.c.base_model, operations.c.kind, operations.c.tenant_id)
    )


# One query for each partial index. The indexes hold pending operations only.
_QUEUE = union_all(
    _pending(IS_SAMPLE, operations.c.reserved_tokens),
    _pending(IS_TRAINING, operations.c.tokens),
)


async def read_queue_parts(session: AsyncSession) -> Sequence[QueuePart]:
    """Return the pending operations, told apart by base model, kind and tenant."""
    rows = await session.execute(_QUEUE)
    return [
        QueuePart(row.base_model, row.kind, row.tenant_id, row.pending, int(row.tokens or 0), row.oldest)
        for row in rows
    ]


async def served_tokens(session: AsyncSession, *, since: datetime) -> dict[str, int]:
    """Return the tokens of each tenant's operations that have ended since then and are not pruned yet."""
    rows = await session.execute(
        select(operations.c.tenant_id, func.sum(operations.c.tokens).label("tokens"))
        .where(
            operations.c.finished_at.is_not(None), operations.c.pruned_at.is_(None), operations.c.finished_at > since
        )
        .group_by(operations.c.tenant_id)
    )
    return {row.tenant_id: int(row.tokens or 0) for row in rows}
