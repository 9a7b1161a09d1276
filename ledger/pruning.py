"""Pruning: deletes results after their grace time, and payloads that no replay needs.

The operation's row stays. It still answers a repeated request, and a failed operation keeps its reason.
"""

from datetime import datetime

from sqlalchemy import bindparam, delete, func, select, text, true, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ledger_records import OperationState
from ledger.statements import operations, payloads, results, runs
from store.tables import RunState
from tenants.sample_reports import prune_reports
from tenants.usage import roll_up

PRUNE_BATCH = 1000
"""Most operations pruned by one transaction: a larger one would block other writers for long."""

_STALE = (
    select(operations.c.id)
    .where(operations.c.finished_at < bindparam("finished_before"), operations.c.pruned_at.is_(None))
    .order_by(operations.c.finished_at)
    .limit(PRUNE_BATCH)
    .with_for_update(skip_locked=True)
)
"""Locks the rows on PostgreSQL, so that two sweeps at once do not count an operation's usage twice."""
_DROP_RESULTS = delete(results).where(results.c.operation_id.in_(bindparam("ids", expanding=True)))
_MARK_PRUNED = (
    update(operations).where(operations.c.id.in_(bindparam("ids", expanding=True))).values(pruned_at=bindparam("now"))
)

# A payload is needed while its done operation lies after the newest snapshot of a run that can still be replayed.
# Counted, since the planner would turn NOT EXISTS into a join with the whole ledger.
_IS_NEEDLESS = (
    select(func.count())
    .select_from(operations.join(runs, runs.c.id == operations.c.lane))
    .where(
        operations.c.id == payloads.c.operation_id,
        operations.c.state == OperationState.DONE,
        operations.c.seq_id > runs.c.snapshot_seq_id,
        runs.c.state == RunState.READY,
    )
    .scalar_subquery()
) == 0
_OF_THESE = payloads.c.operation_id.in_(bindparam("ids", expanding=True))
_DROP_PAYLOADS = delete(payloads).where(_OF_THESE, _IS_NEEDLESS)
_KEEP_PAYLOADS = update(payloads).where(_OF_THESE).values(kept_for_replay=true())
# Literal text, as in the partial index: SQLAlchemy would render the column as a comparison on SQLite.
_DROP_KEPT_PAYLOADS = delete(payloads).where(text("kept_for_replay"), _IS_NEEDLESS)
"""Deletes payloads kept for replay that a snapshot has covered since, or whose run has ended."""


async def prune(transaction: AsyncSession, *, finished_before: datetime, now: datetime) -> int:
    """Prune at most ``PRUNE_BATCH`` operations that ended before ``finished_before``; return how many.

    The usage of the operations' tenants is added up first, in the same transaction.
    """
    stale = list((await transaction.scalars(_STALE, {"finished_before": finished_before})).all())
    if stale:
        ids = {"ids": stale}
        await roll_up(transaction, stale)
        await transaction.execute(_DROP_RESULTS, ids)
        await prune_reports(transaction, stale)
        await transaction.execute(_MARK_PRUNED, {**ids, "now": now})
        await transaction.execute(_DROP_PAYLOADS, ids)
        await transaction.execute(_KEEP_PAYLOADS, ids)
    await transaction.execute(_DROP_KEPT_PAYLOADS)
    return len(stale)
