"""SQL statements of the ledger's hot paths, built once when the module is imported.

Building a SQLAlchemy statement costs several times what the database takes to run it. Core tables are used instead of
mapped classes for the same reason. Each ``bindparam`` names a parameter. Pruning's statements are in ``ledger.pruning``.
"""

from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    Select,
    Table,
    all_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from contracts.errors import CANCELLED_CODES
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from store.pending_operations import IS_PENDING, IS_TRAINING
from store.tables import Budget, Operation, OperationPayload, OperationResult, Placement, Run, SampleProgress, Tenant
from tenants.budgets import is_spent_for
from tenants.limit_use import training_use
from tenants.limits import Counted, shared_count
from tenants.line_charges import charged_lines
from tenants.rate_lines import STATE_COLUMNS, has_places, held_until
from tenants.rates import COLUMNS, RATE_TENANT, Meter, charge_after, rate_joined, rates
from tenants.shares import weight

MAX_READY = 256
"""Most operations decoded by one query: bounds memory. The next query finds the rest."""
MAX_PENDING = 2048
"""Most rows, without payloads, read by one query."""

operations = cast(Table, Operation.__table__)
payloads = cast(Table, OperationPayload.__table__)
results = cast(Table, OperationResult.__table__)
runs = cast(Table, Run.__table__)
placements = cast(Table, Placement.__table__)
tenants = cast(Table, Tenant.__table__)
progresses = cast(Table, SampleProgress.__table__)
budgets = cast(Table, Budget.__table__)

FIND = select(operations.c.id, operations.c.body_digest).where(
    operations.c.lane == bindparam("lane"), operations.c.seq_id == bindparam("seq_id")
)

_INSERTS: dict[str, Any] = {"sqlite": sqlite_insert, "postgresql": postgres_insert}
INSERT_UNLESS_PRESENT = {
    dialect: make(operations).on_conflict_do_nothing().returning(operations.c.id) for dialect, make in _INSERTS.items()
}
"""Inserts one operation, by dialect. Returns no row when its key exists."""

_held = select(shared_count(Counted.TRAINING, RATE_TENANT).label("held")).cte("held")
# The lock before the rate, as where there is little room: two requests of a tenant never wait for each other.
_charged = charge_after(_held).cte("charged")
INSERT_CHARGED = (
    postgres_insert(operations)
    .values(rate_mark=select(_charged.c.mark).scalar_subquery())
    .on_conflict_do_nothing()
    .returning(
        operations.c.id,
        select(_charged.c.mark).scalar_subquery().label("mark"),
        select(_charged.c.tat).scalar_subquery().label("tat"),
    )
)
"""Charges the operation's tenant and inserts it, on PostgreSQL, with the mark in one statement; returns what was charged."""
MARK = update(operations).where(operations.c.id == bindparam("operation_id")).values(rate_mark=bindparam("mark"))

INSERT_MANY_UNLESS_PRESENT = {dialect: make(operations).on_conflict_do_nothing() for dialect, make in _INSERTS.items()}
"""Inserts operations, by dialect, and skips keys that exist. ``PRESENT`` then tells which ids were inserted."""
PRESENT = select(operations.c.id).where(operations.c.id.in_(bindparam("ids", expanding=True)))
TAKE_BACK = delete(operations).where(operations.c.id.in_(bindparam("ids", expanding=True)))
"""Deletes operations that the same transaction has inserted, without payloads yet."""
PLACE_UNLESS_PRESENT = {dialect: make(placements).on_conflict_do_nothing() for dialect, make in _INSERTS.items()}
INSERT_PAYLOAD = insert(payloads)
INSERT_RESULT = insert(results)

_OWNER = bindparam("owner", type_=payloads.c.tenant_id.type)
_USE = [column.label(name) for name, column in training_use(_OWNER).items()]
_COUNTED_PAYLOAD = insert(payloads).values(
    operation_id=bindparam("operation"), tenant_id=_OWNER, body=bindparam("payload"), file_digest=bindparam("digest")
)
# Taken by PostgreSQL until the transaction ends (``ledger.training_intake``).
_SHARED_LOCK = shared_count(Counted.TRAINING, _OWNER)
INSERT_COUNTED_PAYLOAD = {
    "sqlite": _COUNTED_PAYLOAD.returning(*_USE),
    "postgresql": _COUNTED_PAYLOAD.returning(*_USE, _SHARED_LOCK),
}
"""Inserts the payload of a training operation, by dialect, and counts the tenant's pending ones, this one included."""
_counting = select(_SHARED_LOCK.label("held")).cte("counting")
_lines = charged_lines(_counting)
_counted = select(*_USE).select_from(_counting).subquery("counted")
INSERT_COUNTED_PAYLOAD_IN_LINES = (
    select(_counted, *(_lines.lines.c[column.name] for column in STATE_COLUMNS))
    .select_from(_counted.outerjoin(_lines.lines, true()))
    .add_cte(_COUNTED_PAYLOAD.cte("stored"), _lines.places)
)
"""The same on PostgreSQL for one that stands in lines, which it charges after the count's lock. One row, or one for each line."""

_waits_behind = operations.alias("waits_behind")
CLOSES_GAP = select(runs.c.id).where(
    runs.c.id == bindparam("lane"),
    runs.c.next_seq_id == bindparam("seq_id"),
    select(_waits_behind.c.id)
    .where(
        _waits_behind.c.lane == bindparam("lane"),
        _waits_behind.c.seq_id > bindparam("seq_id"),
        _waits_behind.c.state == literal_column("'pending'"),
    )
    .exists(),
)
"""Finds the run if accepted operations of it wait for this seq_id."""
OLDEST_PENDING = (
    select(operations.c.id)
    .where(IS_PENDING, IS_TRAINING, operations.c.tenant_id == bindparam("tenant"))
    .order_by(operations.c.position)
    .limit(1)
)
"""Finds the tenant's pending training operation that was accepted first."""

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
    operations.c.attempts,
    operations.c.claims,
    payloads.c.body,
    payloads.c.file_digest,
    weight(tenants.c),
    select(progresses.c.operation_id)
    .where(progresses.c.operation_id == operations.c.id)
    .exists()
    .label("has_progress"),
)
_READY: Select[Any] = (
    select(*_READY_COLUMNS)
    .join_from(operations, payloads, payloads.c.operation_id == operations.c.id, isouter=True)
    .join(tenants, tenants.c.id == operations.c.tenant_id)
)

_WITHOUT_PAYLOAD: Select[Any] = (
    select(
        operations.c.id,
        operations.c.position,
        operations.c.tenant_id,
        operations.c.lane,
        operations.c.seq_id,
        operations.c.kind,
        operations.c.tokens,
        operations.c.payload_bytes,
        operations.c.trace_id,
        runs.c.next_seq_id,
        runs.c.lease_token,
        runs.c.weight.label("run_weight"),
        runs.c.rank,
        runs.c.alpha,
        runs.c.seed,
        runs.c.train_attn,
        runs.c.train_mlp,
        runs.c.train_unembed,
        weight(tenants.c),
    )
    .join_from(operations, runs, runs.c.id == operations.c.lane)
    .join(tenants, tenants.c.id == operations.c.tenant_id)
)

_PENDING_TRAINING: Select[Any] = (
    _WITHOUT_PAYLOAD.add_columns(
        operations.c.rate_mark,
        is_spent_for(operations.c.tenant_id, operations.c.key_id, operations.c.lane).label("is_over_budget"),
        held_until(operations.c.id).label("lines_until"),
        *COLUMNS,
    )
    .outerjoin(rates, rate_joined(operations.c.tenant_id, Meter.TRAIN))
    .where(
        IS_PENDING,
        IS_TRAINING,
        operations.c.base_model == bindparam("base_model"),
        operations.c.position > bindparam("after_position"),
        runs.c.trainer_id == bindparam("trainer"),
        tenants.c.suspended_at.is_(None),
    )
    .order_by(operations.c.position)
    .limit(MAX_PENDING)
)
PENDING_TRAINING: dict[str, Select[Any]] = {
    # With one service, which SQLite has, nothing is looked at twice.
    "sqlite": _PENDING_TRAINING,
    "postgresql": _PENDING_TRAINING.where(operations.c.position != all_(bindparam("known", type_=ARRAY(BigInteger)))),
}
"""Finds the trainer's pending operations, by dialect. ``known``: positions to leave out, before anything else is read of them."""
PENDING_OF_RUNS: Select[Any] = _PENDING_TRAINING.where(operations.c.lane.in_(bindparam("lanes", expanding=True)))

BY_ID = _READY.where(operations.c.id.in_(bindparam("ids", expanding=True))).order_by(operations.c.position)

# Rows that the snapshot covers may be forgotten, and the lane of a run may be long.
_last_done = (
    select(func.max(operations.c.seq_id))
    .where(
        operations.c.lane == runs.c.id,
        operations.c.seq_id > runs.c.snapshot_seq_id,
        operations.c.seq_id < runs.c.next_seq_id,
        operations.c.state == OperationState.DONE,
    )
    .scalar_subquery()
)
LANE_POSITIONS = select(
    runs.c.id, runs.c.next_seq_id, func.coalesce(_last_done, runs.c.snapshot_seq_id).label("done")
).where(runs.c.id.in_(bindparam("lanes", expanding=True)))

_WITHOUT_EFFECT = (
    OperationKind.FORWARD,
    OperationKind.SAVE_WEIGHTS,
    OperationKind.SAVE_WEIGHTS_FOR_SAMPLER,
    OperationKind.SAVE_WEIGHTS_EXTERNAL,
)
TO_REPLAY = (
    _WITHOUT_PAYLOAD.where(
        operations.c.lane == bindparam("lane"),
        operations.c.seq_id > bindparam("after_seq_id"),
        operations.c.seq_id < bindparam("before_seq_id"),
        operations.c.state == OperationState.DONE,
        operations.c.kind.not_in(_WITHOUT_EFFECT),
    )
    .order_by(operations.c.seq_id)
    .limit(MAX_PENDING)
)

FINISH = (
    update(operations)
    .where(operations.c.id == bindparam("operation_id"), operations.c.state == OperationState.PENDING)
    .values(
        state=bindparam("new_state"),
        finished_at=bindparam("now"),
        result_bytes=bindparam("size"),
        tokens=operations.c.tokens + bindparam("made"),
        sampled_tokens=bindparam("made"),
        cached_tokens=bindparam("cached"),
        error_code=bindparam("code"),
        error_category=bindparam("category"),
        error_message=bindparam("message"),
    )
)

# One by one: a statement for several rows takes no list.
_was_cancelled = or_(*(operations.c.error_code == code for code in CANCELLED_CODES))

METER_CANCELLED = (
    update(operations)
    .where(
        operations.c.id == bindparam("operation_id"),
        _was_cancelled,
        operations.c.tokens == 0,
    )
    .values(tokens=bindparam("used"), sampled_tokens=bindparam("made"), cached_tokens=bindparam("cached"))
)
"""Counts the tokens of a sample that was cancelled while it was drawn, once."""

_has_budget = select(budgets.c.tenant_id).where(budgets.c.tenant_id == operations.c.tenant_id).exists()
CHARGED_COLUMNS = (
    operations.c.id,
    operations.c.tenant_id,
    operations.c.kind,
    operations.c.lane,
    operations.c.base_model,
    operations.c.key_id,
    operations.c.tokens,
    operations.c.reserved_tokens,
    operations.c.rate_mark,
    operations.c.finished_at,
    _has_budget.label("has_budget"),
    has_places.label("has_places"),
)
"""Columns by which an operation that ends is settled (``ledger.settlement``)."""

CUT_UNCOUNTED = (
    select(*CHARGED_COLUMNS)
    .where(
        operations.c.id.in_(bindparam("ids", expanding=True)),
        _was_cancelled,
        operations.c.tokens == 0,
    )
    .order_by(operations.c.id)
    .with_for_update(of=operations)
)
"""Finds cancelled samples whose tokens ``METER_CANCELLED`` has not counted, and locks them."""

DROP_PAYLOADS = delete(payloads).where(payloads.c.operation_id.in_(bindparam("ids", expanding=True)))
"""Deletes the payloads of operations that failed: nothing computes them again, and no tenant's bound counts them any more."""

STILL_PENDING = (
    select(*CHARGED_COLUMNS, operations.c.taken_by)
    .where(operations.c.id.in_(bindparam("ids", expanding=True)), operations.c.state == OperationState.PENDING)
    .order_by(operations.c.id)
    .with_for_update(of=operations)
)
"""Locks the rows on PostgreSQL: when two processes complete an operation, the second finds it final."""

LEASES = select(runs.c.id, runs.c.trainer_id, runs.c.lease_token).where(
    runs.c.id.in_(bindparam("lanes", expanding=True)), runs.c.trainer_id.is_not(None)
)

PENDING_NEXT = (
    select(operations.c.id)
    .join_from(operations, runs, runs.c.id == operations.c.lane)
    .where(runs.c.id == bindparam("lane"), operations.c.seq_id == runs.c.next_seq_id, IS_PENDING)
)
"""Finds the operation that may run next in the run, if it was accepted."""

STATES = select(operations.c.id, operations.c.state).where(operations.c.id.in_(bindparam("ids", expanding=True)))

LOCK_RUNS = (
    select(runs.c.id, runs.c.trainer_id, runs.c.lease_token, runs.c.optimizer_steps)
    .where(runs.c.id.in_(bindparam("lanes", expanding=True)))
    .order_by(runs.c.id)
    .with_for_update()
)
"""Locks the runs, so that neither ``next_seq_id`` nor the lease changes before the transaction ends."""

_final = select(runs.c.next_seq_id.label("seq_id")).where(runs.c.id == bindparam("lane")).cte("final", recursive=True)
_state_there = (
    select(operations.c.state)
    .where(operations.c.lane == bindparam("lane"), operations.c.seq_id == _final.c.seq_id)
    .scalar_subquery()
)
_final = _final.union_all(select(_final.c.seq_id + 1).where(_state_there != literal_column("'pending'")))
_next = select(func.max(_final.c.seq_id)).scalar_subquery()
ADVANCE = (
    update(runs)
    .where(runs.c.id == bindparam("lane"), _next > runs.c.next_seq_id)
    .values(
        next_seq_id=_next,
        last_request_at=bindparam("now"),
        optimizer_steps=runs.c.optimizer_steps + bindparam("steps"),
    )
)
"""Moves a run whose next operation is final to the first seq_id that is missing or not final.

The recursion steps from one seq_id to the next. A join with the rows of a long lane would be planned as a scan of the whole
ledger.
"""

READ_ALONG_BYTES = 64 * 1024
"""Largest result that is read together with its operation's status; a second query would cost more."""

STATUSES: Select[Any] = (
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

ENDED = select(operations.c.id).where(
    operations.c.id.in_(bindparam("ids", expanding=True)), operations.c.state != literal_column("'pending'")
)

RESULT = select(results.c.body).where(
    results.c.operation_id == bindparam("operation_id"), results.c.tenant_id == bindparam("tenant")
)
