"""The ledger's hot statements, built once: making one costs several times what the database takes to run it.

Core tables instead of mapped classes, for the same reason. Parameters are named by ``bindparam``.
"""

from typing import Any, cast

from sqlalchemy import Select, Table, bindparam, case, func, insert, literal_column, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from engine.contracts.operations import OperationKind
from tenants.models import Operation, OperationPayload, OperationResult, OperationState, Run, Tenant

MAX_READY = 256
"""Operations decoded in one claim: bounds memory, the rest are found by the next one."""
MAX_PENDING = 2048
"""Rows without their payloads read in one look."""

operations = cast(Table, Operation.__table__)
payloads = cast(Table, OperationPayload.__table__)
results = cast(Table, OperationResult.__table__)
runs = cast(Table, Run.__table__)
tenants = cast(Table, Tenant.__table__)

FIND = select(operations.c.id, operations.c.body_digest).where(
    operations.c.lane == bindparam("lane"), operations.c.seq_id == bindparam("seq_id")
)

_INSERTS: dict[str, Any] = {"sqlite": sqlite_insert, "postgresql": postgres_insert}
INSERT_UNLESS_PRESENT = {
    dialect: make(operations).on_conflict_do_nothing().returning(operations.c.id) for dialect, make in _INSERTS.items()
}
"""By dialect: returns no row when the key is taken."""

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
    payloads.c.body,
)
_READY: Select[Any] = select(*_READY_COLUMNS).join_from(
    operations, payloads, payloads.c.operation_id == operations.c.id
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
        runs.c.next_seq_id,
        tenants.c.share,
    )
    .join_from(operations, runs, runs.c.id == operations.c.lane)
    .join(tenants, tenants.c.id == operations.c.tenant_id)
    .where(
        operations.c.state == OperationState.PENDING,
        operations.c.kind != OperationKind.SAMPLE,
        operations.c.base_model == bindparam("base_model"),
        operations.c.position > bindparam("after_position"),
    )
    .order_by(operations.c.position)
    .limit(MAX_PENDING)
)

BY_ID = _READY.where(operations.c.id.in_(bindparam("ids", expanding=True))).order_by(operations.c.position)

NEXT_SEQ_IDS = select(runs.c.id, runs.c.next_seq_id).where(runs.c.id.in_(bindparam("lanes", expanding=True)))

PENDING_SAMPLES = (
    _READY.where(
        operations.c.state == OperationState.PENDING,
        operations.c.kind == OperationKind.SAMPLE,
        operations.c.base_model == bindparam("base_model"),
        operations.c.position > bindparam("after_position"),
    )
    .order_by(operations.c.position)
    .limit(MAX_READY)
)

_MINE_PENDING = (
    select(operations.c.tenant_id)
    .where(
        # Literal, as in the partial index: a bound value would keep SQLite from using it.
        operations.c.state == literal_column("'pending'"),
        operations.c.kind == literal_column("'sample'"),
        operations.c.tenant_id == bindparam("tenant"),
    )
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
    select(runs.c.id).where(runs.c.id.in_(bindparam("lanes", expanding=True))).order_by(runs.c.id).with_for_update()
)

FINAL_FROM_NEXT = (
    select(operations.c.lane, operations.c.seq_id, runs.c.next_seq_id)
    .join_from(operations, runs, runs.c.id == operations.c.lane)
    .where(
        runs.c.id.in_(bindparam("lanes", expanding=True)),
        operations.c.seq_id >= runs.c.next_seq_id,
        operations.c.state != OperationState.PENDING,
    )
    .order_by(operations.c.lane, operations.c.seq_id)
)

ADVANCE = (
    update(runs)
    .where(runs.c.id == bindparam("lane"))
    .values(next_seq_id=bindparam("next"), last_request_at=bindparam("now"))
)

READ_ALONG_BYTES = 64 * 1024
"""A result up to this size comes with its operation's status: another read would cost more."""

STATUS = (
    select(
        operations.c.id,
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
    .where(operations.c.id == bindparam("operation_id"), operations.c.tenant_id == bindparam("tenant"))
)

RESULT = select(results.c.body).where(
    results.c.operation_id == bindparam("operation_id"), results.c.tenant_id == bindparam("tenant")
)
