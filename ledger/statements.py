"""The ledger's hot statements, built once: making one costs several times what the database takes to run it.

Core tables instead of mapped classes, for the same reason. Parameters are named by ``bindparam``.
"""

from typing import Any, cast

from sqlalchemy import Select, Table, bindparam, case, delete, func, insert, literal_column, select, text, true, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from contracts.ledger_records import OperationState
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.tables import Operation, OperationPayload, OperationResult, Placement, Run, RunState, Tenant

MAX_READY = 256
"""Operations decoded in one claim: bounds memory, the rest are found by the next one."""
MAX_PENDING = 2048
"""Rows without their payloads read in one look."""
PRUNE_BATCH = 1000
"""Rows of one sweep, so that it never holds the writer for long."""

operations = cast(Table, Operation.__table__)
payloads = cast(Table, OperationPayload.__table__)
results = cast(Table, OperationResult.__table__)
runs = cast(Table, Run.__table__)
placements = cast(Table, Placement.__table__)
tenants = cast(Table, Tenant.__table__)

FIND = select(operations.c.id, operations.c.body_digest).where(
    operations.c.lane == bindparam("lane"), operations.c.seq_id == bindparam("seq_id")
)

_INSERTS: dict[str, Any] = {"sqlite": sqlite_insert, "postgresql": postgres_insert}
INSERT_UNLESS_PRESENT = {
    dialect: make(operations).on_conflict_do_nothing().returning(operations.c.id) for dialect, make in _INSERTS.items()
}
"""By dialect: returns no row when the key is taken."""

INSERT_MANY_UNLESS_PRESENT = {dialect: make(operations).on_conflict_do_nothing() for dialect, make in _INSERTS.items()}
"""By dialect; ``PRESENT`` tells which of them were inserted."""
PRESENT = select(operations.c.id).where(operations.c.id.in_(bindparam("ids", expanding=True)))
PLACE_UNLESS_PRESENT = {dialect: make(placements).on_conflict_do_nothing() for dialect, make in _INSERTS.items()}
INSERT_PAYLOAD = insert(payloads)
INSERT_RESULT = insert(results)

_READY_COLUMNS = (
    operations.c.id,
    operations.c.position,
    operations.c.tenant_id,
    operations.c.lane,
    operations.c.seq_id,
    operations.c.kind,
    operations.c.tokens,
    operations.c.trace_id,
    operations.c.created_at,
    payloads.c.body,
    tenants.c.share,
)
_READY: Select[Any] = (
    select(*_READY_COLUMNS)
    .join_from(operations, payloads, payloads.c.operation_id == operations.c.id)
    .join(tenants, tenants.c.id == operations.c.tenant_id)
)

PENDING_TRAINING: Select[Any] = (
    select(
        operations.c.id,
        operations.c.position,
        operations.c.tenant_id,
        operations.c.lane,
        operations.c.seq_id,
        operations.c.kind,
        operations.c.tokens,
        operations.c.trace_id,
        runs.c.next_seq_id,
        runs.c.lease_token,
        tenants.c.share,
    )
    .join_from(operations, runs, runs.c.id == operations.c.lane)
    .join(tenants, tenants.c.id == operations.c.tenant_id)
    .where(
        IS_PENDING,
        IS_TRAINING,
        operations.c.base_model == bindparam("base_model"),
        operations.c.position > bindparam("after_position"),
        runs.c.trainer_id == bindparam("trainer"),
    )
    .order_by(operations.c.position)
    .limit(MAX_PENDING)
)

BY_ID = _READY.where(operations.c.id.in_(bindparam("ids", expanding=True))).order_by(operations.c.position)

NEXT_SEQ_IDS = select(runs.c.id, runs.c.next_seq_id).where(runs.c.id.in_(bindparam("lanes", expanding=True)))

PENDING_SAMPLES = (
    _READY.where(
        IS_PENDING,
        IS_SAMPLE,
        operations.c.base_model == bindparam("base_model"),
        operations.c.position > bindparam("after_position"),
    )
    .order_by(operations.c.position)
    .limit(MAX_READY)
)

TAKE_SAMPLES = (
    update(operations)
    .where(
        operations.c.position.in_(
            select(operations.c.position)
            .where(
                IS_PENDING,
                IS_SAMPLE,
                operations.c.base_model == bindparam("base"),
                operations.c.taken_by.is_(None),
            )
            .order_by(operations.c.position)
            .limit(bindparam("most"))
            .with_for_update(skip_locked=True)
        )
    )
    .values(taken_by=bindparam("process"))
    .returning(operations.c.id)
)

GIVE_BACK_SAMPLES = (
    update(operations)
    .where(
        IS_PENDING,
        IS_SAMPLE,
        operations.c.base_model == bindparam("base"),
        operations.c.taken_by == bindparam("process"),
        operations.c.id.not_in(bindparam("but", expanding=True)),
    )
    .values(taken_by=None)
)

_MINE_PENDING = (
    select(operations.c.tenant_id)
    .where(IS_PENDING, IS_SAMPLE, operations.c.tenant_id == bindparam("tenant"))
    .limit(bindparam("at_most"))
)
SAMPLES_PENDING = select(func.count()).select_from(_MINE_PENDING.subquery())

TO_REPLAY = _READY.where(
    operations.c.lane == bindparam("lane"),
    operations.c.seq_id > bindparam("after_seq_id"),
    operations.c.seq_id < bindparam("before_seq_id"),
    operations.c.state == OperationState.DONE,
).order_by(operations.c.seq_id)

FINISH = (
    update(operations)
    .where(operations.c.id == bindparam("operation_id"), operations.c.state == OperationState.PENDING)
    .values(
        state=bindparam("new_state"),
        finished_at=bindparam("now"),
        result_bytes=bindparam("size"),
        tokens=operations.c.tokens + bindparam("made"),
        error_code=bindparam("code"),
        error_category=bindparam("category"),
        error_message=bindparam("message"),
    )
)

STILL_PENDING = (
    select(operations.c.id)
    .where(operations.c.id.in_(bindparam("ids", expanding=True)), operations.c.state == OperationState.PENDING)
    .order_by(operations.c.id)
    .with_for_update()
)
"""Locked where rows can be: of two that complete an operation one finds it final."""

LOCK_RUNS = (
    select(runs.c.id, runs.c.trainer_id, runs.c.lease_token)
    .where(runs.c.id.in_(bindparam("lanes", expanding=True)))
    .order_by(runs.c.id)
    .with_for_update()
)
"""Two transactions that finish neighbours must not both read the old ``next_seq_id``, and a lease must not move meanwhile."""

_final = (
    select(runs.c.id.label("lane"), runs.c.next_seq_id, runs.c.next_seq_id.label("seq_id"))
    .where(runs.c.id.in_(bindparam("lanes", expanding=True)))
    .cte("final", recursive=True)
)
_state_there = (
    select(operations.c.state)
    .where(operations.c.lane == _final.c.lane, operations.c.seq_id == _final.c.seq_id)
    .scalar_subquery()
)
_final = _final.union_all(
    select(_final.c.lane, _final.c.next_seq_id, _final.c.seq_id + 1).where(_state_there != literal_column("'pending'"))
)
PAST_FINAL = (
    select(_final.c.lane, func.max(_final.c.seq_id).label("next"))
    .group_by(_final.c.lane, _final.c.next_seq_id)
    .having(func.max(_final.c.seq_id) > _final.c.next_seq_id)
)
"""Of each lane whose next operation is final: the first seq_id after it that is not final, or not there.

Goes from one seq_id to the next: a join of many long lanes with their rows would be planned as a scan of the whole ledger.
"""

ADVANCE = (
    update(runs)
    .where(runs.c.id == bindparam("lane"))
    .values(next_seq_id=bindparam("next"), last_request_at=bindparam("now"))
)

READ_ALONG_BYTES = 64 * 1024
"""A result up to this size comes with its operation's status: another read would cost more."""

STATUSES = (
    select(
        operations.c.id,
        operations.c.tenant_id,
        operations.c.kind,
        operations.c.lane,
        operations.c.state,
        operations.c.result_bytes,
        operations.c.pruned_at,
        operations.c.error_code,
        operations.c.error_category,
        operations.c.error_message,
        case((operations.c.result_bytes <= READ_ALONG_BYTES, results.c.body)).label("body"),
    )
    .join_from(operations, results, results.c.operation_id == operations.c.id, isouter=True)
    .where(operations.c.id.in_(bindparam("ids", expanding=True)))
)

RESULT = select(results.c.body).where(
    results.c.operation_id == bindparam("operation_id"), results.c.tenant_id == bindparam("tenant")
)

STALE = (
    select(operations.c.id)
    .where(operations.c.finished_at < bindparam("finished_before"), operations.c.pruned_at.is_(None))
    .order_by(operations.c.finished_at)
    .limit(PRUNE_BATCH)
    .with_for_update(skip_locked=True)
)
"""Locked where rows can be: two sweeps at once do not count an operation twice."""
DROP_RESULTS = delete(results).where(results.c.operation_id.in_(bindparam("ids", expanding=True)))
MARK_PRUNED = (
    update(operations).where(operations.c.id.in_(bindparam("ids", expanding=True))).values(pruned_at=bindparam("now"))
)

# A count, since the planner would turn NOT EXISTS into a join with the whole ledger.
_is_needless = (
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
DROP_PAYLOADS = delete(payloads).where(_OF_THESE, _is_needless)
KEEP_PAYLOADS = update(payloads).where(_OF_THESE).values(kept_for_replay=true())
# As in the partial index: for SQLite the column itself would become a comparison.
DROP_KEPT_PAYLOADS = delete(payloads).where(text("kept_for_replay"), _is_needless)
"""Those that a snapshot has covered since, or whose run has ended."""
