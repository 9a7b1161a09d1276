"""Pruning: deletes results after their grace time, payloads that no replay needs, and at last the operations' rows.

Until its row goes, an operation answers a repeated request, and a failed one keeps its reason.
"""

from datetime import datetime

from sqlalchemy import ColumnElement, bindparam, case, delete, exists, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from ledger.statements import operations, payloads, results, runs
from store.batcher import few_lengths
from store.tables import RunState, Sampler
from store.tables.runs import HAS_COVERED_PAYLOADS
from tenants.forced_silence import were_answered
from tenants.own_samplers import forget_own_samplers
from tenants.rate_lines import prune_places
from tenants.sample_progress import prune_progress
from tenants.sample_reports import prune_reports
from tenants.usage import roll_up

PRUNE_BATCH = 250
"""Most operations pruned by one transaction: a larger one would block other writers for long."""
SEEN_BATCH = 1000
"""Most rows that a transaction of ``forget_operations`` looks at."""
REPEATABLE = 1024
"""Last operations of an open run whose rows stay: a client that was stopped for days sends the last of them again."""
_MOST_RUNS = 4
_MOST_SEQ_IDS = 250
"""Most operations of one run whose payloads a transaction deletes: a thousand rows with all of its runs."""

_STALE = (
    select(operations.c.id)
    .where(operations.c.finished_at < bindparam("finished_before"), operations.c.pruned_at.is_(None))
    .where(were_answered(operations.c.tenant_id, bindparam("finished_before")))
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
# Counted, and the run asked for by its key: the planner would join with the whole ledger, and with all runs.
_replayed_after = (
    select(runs.c.snapshot_seq_id)
    .where(runs.c.id == operations.c.lane, runs.c.state == RunState.READY)
    .scalar_subquery()
)
_IS_NEEDLESS = (
    select(func.count())
    .select_from(operations)
    .where(
        operations.c.id == payloads.c.operation_id,
        operations.c.state == OperationState.DONE,
        operations.c.seq_id > _replayed_after,
    )
    .scalar_subquery()
) == 0
_DROP_PAYLOADS = delete(payloads).where(payloads.c.operation_id.in_(bindparam("ids", expanding=True)), _IS_NEEDLESS)


async def prune(transaction: AsyncSession, *, finished_before: datetime, now: datetime) -> int:
    """Prune at most ``PRUNE_BATCH`` operations that ended before ``finished_before``; return how many.

    The usage of the operations' tenants is added up first, in the same transaction.
    """
    stale = list((await transaction.scalars(_STALE, {"finished_before": finished_before})).all())
    if stale:
        ids = {"ids": few_lengths(stale)}
        await roll_up(transaction, stale)
        await transaction.execute(_DROP_RESULTS, ids)
        await prune_reports(transaction, stale)
        await prune_progress(transaction, stale)
        await prune_places(transaction, stale)
        await transaction.execute(_MARK_PRUNED, {**ids, "now": now})
        await transaction.execute(_DROP_PAYLOADS, ids)
    return len(stale)


# --- payloads that outlived their results ----------------------------------------------------------------------------

# Nothing after the snapshot of an ended run is replayed either.
_COVERED_TO = case(
    (runs.c.state.in_([RunState.UNLOADED, RunState.FAILED]), runs.c.next_seq_id - 1), else_=runs.c.snapshot_seq_id
)
_COVERED = (
    select(runs.c.id, runs.c.payloads_dropped_to, _COVERED_TO.label("covered_to"))
    .where(HAS_COVERED_PAYLOADS)
    .order_by(runs.c.id)
    .limit(_MOST_RUNS)
    .with_for_update(skip_locked=True)
)
_DROP_COVERED = delete(payloads).where(
    payloads.c.operation_id.in_(
        select(operations.c.id).where(
            operations.c.lane == bindparam("lane"),
            operations.c.seq_id > bindparam("after"),
            operations.c.seq_id <= bindparam("upto"),
        )
    )
)
_NOTE_DROPPED = update(runs).where(runs.c.id == bindparam("lane")).values(payloads_dropped_to=bindparam("upto"))


async def drop_covered_payloads(transaction: AsyncSession) -> int:
    """Delete payloads that a run's newer snapshot covers, or whose run has ended; return how many runs had any.

    Only the operations between the run's last look and its snapshot are visited. At most ``_MOST_SEQ_IDS`` of a run are.
    """
    due = (await transaction.execute(_COVERED)).all()
    steps = [
        {
            "lane": run.id,
            "after": run.payloads_dropped_to,
            "upto": min(run.covered_to, run.payloads_dropped_to + _MOST_SEQ_IDS),
        }
        for run in due
    ]
    if steps:
        await transaction.execute(_DROP_COVERED, steps)
        await transaction.execute(_NOTE_DROPPED, [{"lane": one["lane"], "upto": one["upto"]} for one in steps])
    return len(steps)


# --- rows ------------------------------------------------------------------------------------------------------------

# The first operation of a run makes it: a repeat of that request finds the run by it.
_MAY_COME_AGAIN: ColumnElement[bool] = exists().where(
    runs.c.id == operations.c.lane,
    runs.c.state.in_([RunState.CREATING, RunState.READY]),
    or_(
        operations.c.seq_id == 0,
        operations.c.seq_id > runs.c.payloads_dropped_to,
        operations.c.seq_id >= runs.c.next_seq_id - REPEATABLE,
    ),
)
_IS_NEEDED = or_(
    operations.c.pruned_at.is_(None),
    operations.c.pruned_at >= bindparam("pruned_before"),
    operations.c.finished_at >= bindparam("pruned_before"),
    case((operations.c.kind == OperationKind.SAMPLE, literal(False)), else_=_MAY_COME_AGAIN),
)
_SEEN = (
    select(operations.c.position, operations.c.created_at, _IS_NEEDED.label("is_needed"))
    .where(operations.c.position > bindparam("after"))
    .order_by(operations.c.position)
    .limit(SEEN_BATCH)
)
_FORGET = (
    delete(operations)
    .where(operations.c.position.in_(bindparam("positions", expanding=True)))
    .returning(operations.c.lane)
)


async def forget_operations(transaction: AsyncSession, *, before: datetime, after: int) -> tuple[int, int | None]:
    """Delete old operations' rows among the next ``SEEN_BATCH`` in order of acceptance.

    A row goes once its result was pruned and it is older than ``before``. Of an open run those stay that a replay needs, the
    last ``REPEATABLE``, and the first. Return how many went, and the position from which the next call goes on; None at the end.
    """
    seen = (await transaction.execute(_SEEN, {"after": after, "pruned_before": before})).all()
    needless = [row.position for row in seen if not row.is_needed]
    if needless:
        lanes = {row.lane for row in await transaction.execute(_FORGET, {"positions": few_lengths(needless)})}
        await forget_own_samplers(transaction, Sampler.id.in_(few_lengths(sorted(lanes))))
    is_end = len(seen) < SEEN_BATCH or seen[-1].created_at >= before
    return len(needless), None if is_end else seen[-1].position
