"""Gaps: a run's ``seq_id`` that has not come while later ones wait behind it.

A client sends a request again for minutes. A request that was refused outside the service, as by a proxy, is never sent again,
and its client goes on with the next ``seq_id``. So the number counts as failed once the run has had no request for long.
"""

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import and_, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest
from contracts.ids import RunId, TenantId
from contracts.ledger_records import UNLOAD_SEQ_ID, OperationState, RejectedOperation
from contracts.operations import OperationKind
from ledger import statements as sql
from ledger.rows import new_row
from ledger.statements import operations, runs
from ledger.turns import advance, lock_runs
from ledger.wakeups import Wakeups, placements_topic, trainer_topic
from store.pending_operations import IS_PENDING, IS_TRAINING
from store.tables import RunState
from tenants.forced_silence import were_answered

log = logging.getLogger(__name__)

_MOST_RUNS = 8
_MOST_SEQ_IDS = 64
"""Most numbers of one run that a transaction fails."""
_NO_REQUEST = b""
"""Digest of a request that never came: it conflicts with no other."""

_next = operations.alias("next_operation")
_HAS_GAP = and_(
    runs.c.state == RunState.READY,
    ~select(_next.c.id).where(_next.c.lane == runs.c.id, _next.c.seq_id == runs.c.next_seq_id).exists(),
)
_first_behind = func.min(operations.c.seq_id)
_FORSAKEN = (
    select(
        runs.c.id,
        runs.c.tenant_id,
        runs.c.base_model,
        runs.c.trainer_id,
        runs.c.next_seq_id,
        _first_behind.label("first_behind"),
    )
    .join_from(operations, runs, runs.c.id == operations.c.lane)
    .where(IS_PENDING, IS_TRAINING, operations.c.seq_id != UNLOAD_SEQ_ID, _HAS_GAP)
    .where(were_answered(runs.c.tenant_id, bindparam("quiet_since")))
    .group_by(runs.c.id)
    .having(func.max(operations.c.created_at) < bindparam("quiet_since"))
    .order_by(runs.c.id)
    .limit(_MOST_RUNS)
)


async def closes_gap(session: AsyncSession, run: RunId, seq_id: int) -> bool:
    """Return whether accepted operations of the run wait for this number."""
    return await session.scalar(sql.CLOSES_GAP, {"lane": run, "seq_id": seq_id}) is not None


async def close_gaps(transaction: AsyncSession, wakeups: Wakeups, *, quiet_since: datetime, now: datetime) -> int:
    """Record missing numbers as failed, in runs whose last request came before ``quiet_since``. Return how many runs had any.

    At most ``_MOST_RUNS`` runs and ``_MOST_SEQ_IDS`` numbers of each. A request that comes after all gets that failure.
    """
    found = (await transaction.execute(_FORSAKEN, {"quiet_since": quiet_since})).all()
    if not found:
        return 0
    lanes = [run.id for run in found]
    await lock_runs(transaction, lanes)
    rows = [new_row(one, now, OperationState.FAILED) for one in _missing(found)]
    # A request that has just come keeps its number.
    await transaction.execute(sql.INSERT_MANY_UNLESS_PRESENT[transaction.get_bind().dialect.name], rows)
    await advance(transaction, lanes, now)
    for run in found:
        topic = placements_topic(run.base_model) if run.trainer_id is None else trainer_topic(run.trainer_id)
        wakeups.announce_after_commit(transaction, topic)
        log.warning("run=%s: seq_id %d never came, and counts as failed", run.id, run.next_seq_id)
    return len(found)


def _missing(forsaken: Sequence[Any]) -> list[RejectedOperation]:
    return [
        RejectedOperation(
            tenant=TenantId(run.tenant_id),
            lane=run.id,
            seq_id=seq_id,
            kind=OperationKind.FORWARD,
            base_model=run.base_model,
            digest=_NO_REQUEST,
            error=InvalidRequest(
                f"seq_id {seq_id} did not come in time: its model went on with the requests behind it"
            ),
            trainer=run.trainer_id,
        )
        for run in forsaken
        for seq_id in range(run.next_seq_id, min(run.first_behind, run.next_seq_id + _MOST_SEQ_IDS))
    ]
