"""Inspection of operations for operators: which there are, in what state, and what a pending one waits for."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, Select, func, literal_column, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from contracts.errors import NotFound
from contracts.ids import RequestId
from contracts.ledger_records import UNLOAD_SEQ_ID, OperationState
from contracts.operations import OperationKind
from store.batcher import few_lengths
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.tables import (
    AdapterGate,
    Checkpoint,
    Operation,
    Run,
    SampleInFlight,
    Sampler,
    Tenant,
    WorkerProcess,
)

MOST_OPERATIONS = 500
"""Operations that one query returns at most."""
SEARCHED = 10_000
"""Operations accepted last, among which done ones are looked for: no index finds those of one tenant or kind."""


class WaitReason(StrEnum):
    """Reason for which a pending operation does not run now."""

    SUSPENDED = "suspended"
    GATE_CLOSED = "gate_closed"
    BEHIND_OTHERS = "behind_others"
    NO_TRAINER = "no_trainer"
    TRAINER_GONE = "trainer_gone"
    IN_FLIGHT = "in_flight"
    CLAIMED = "claimed"
    ITS_TURN = "its_turn"


@dataclass(frozen=True, slots=True)
class Wait:
    """A pending operation's wait: the reason, and a text that names what is waited for."""

    reason: WaitReason
    text: str


@dataclass(frozen=True, slots=True)
class InspectedOperation:
    """An operation as an operator sees it. ``tenant`` is a name; ``wait`` is None once the operation is final."""

    id: RequestId
    tenant: str
    lane: str
    seq_id: int
    kind: OperationKind
    base_model: str
    state: OperationState
    created_at: datetime
    finished_at: datetime | None
    tokens: int
    attempts: int
    trace_id: str | None
    error_code: str | None
    error_message: str | None
    wait: Wait | None


@dataclass(frozen=True, slots=True)
class OperationFilter:
    """Choice of operations; None takes any. ``tenant`` is a name, ``lane`` the id of a run or sampler."""

    state: OperationState = OperationState.PENDING
    tenant: str | None = None
    lane: str | None = None
    kind: OperationKind | None = None


_trainer = aliased(WorkerProcess)
_run_gate, _pool_gate = aliased(AdapterGate), aliased(AdapterGate)


def _query() -> Any:
    """Return the query for operations with everything that they may wait for; every join is by a primary key."""
    sampled_run = func.coalesce(Sampler.live_run_id, Checkpoint.run_id)
    return (
        select(
            Operation,
            Tenant.name.label("tenant"),
            Tenant.suspended_at,
            Tenant.suspend_reason,
            Run.next_seq_id,
            Run.trainer_id,
            _trainer.expires_at.label("trainer_expires_at"),
            SampleInFlight.replica,
            SampleInFlight.since,
            _run_gate.mode.label("run_mode"),
            _run_gate.expires_at.label("run_expires_at"),
            _run_gate.reason.label("run_reason"),
            _pool_gate.mode.label("pool_mode"),
            _pool_gate.expires_at.label("pool_expires_at"),
            _pool_gate.reason.label("pool_reason"),
        )
        .join(Tenant, Tenant.id == Operation.tenant_id)
        .join(Run, Run.id == Operation.lane, isouter=True)
        .join(_trainer, _trainer.id == Run.trainer_id, isouter=True)
        .join(SampleInFlight, SampleInFlight.operation_id == Operation.id, isouter=True)
        .join(Sampler, Sampler.id == Operation.lane, isouter=True)
        .join(Checkpoint, Checkpoint.id == Sampler.checkpoint_id, isouter=True)
        .join(_run_gate, _run_gate.run_id == sampled_run, isouter=True)
        .join(_pool_gate, _pool_gate.run_id == "pool:" + Operation.base_model, isouter=True)
    )


_QUERY: Select[Any] = _query()


async def list_operations(
    session: AsyncSession, which: OperationFilter, *, most: int, now: datetime
) -> list[InspectedOperation]:
    """Return at most ``most`` operations: pending ones oldest first, others newest first. ``now`` is the database's time.

    Done operations are looked for in the lane, or else among the ``SEARCHED`` that were accepted last.
    """
    most = min(most, MOST_OPERATIONS)
    oldest_first = which.state is OperationState.PENDING
    found = sorted(await session.scalars(_chosen(which, most)), reverse=not oldest_first)
    if not found:
        return []
    # Two queries: a plan of both together may read whole tables to join them.
    rows = await session.execute(_QUERY.where(Operation.position.in_(few_lengths(found[:most]))))
    inspected = {row[0].position: _inspected(row, now) for row in rows}
    return [inspected[position] for position in found if position in inspected]


def _chosen(which: OperationFilter, most: int) -> Any:
    """Return the query for positions of the operations; each part of it reads an index of just such operations."""
    if which.state is OperationState.PENDING:
        # An expression: an index of positions would be walked past all that is not pending.
        oldest = _matching(which).where(IS_PENDING).order_by(Operation.position + 0).limit(most)
        return union_all(*(oldest.where(kinds).subquery().select() for kinds in (IS_SAMPLE, IS_TRAINING)))
    # A literal, as in the partial indexes.
    is_in_state: Any = literal_column(f"'{which.state.value}'")
    if which.lane is not None:
        return _matching(which).where(Operation.state == is_in_state).order_by(Operation.seq_id.desc()).limit(most)
    if which.state is OperationState.FAILED:
        return _matching(which).where(Operation.state == is_in_state).order_by(Operation.position.desc()).limit(most)
    # Read whole before any is chosen. A condition on the position would be estimated as a third of the table.
    newest = aliased(Operation, select(Operation).order_by(Operation.position.desc()).limit(SEARCHED).subquery())
    return _matching(which, newest).where(newest.state == is_in_state).order_by(newest.position.desc()).limit(most)


def _matching(which: OperationFilter, table: type[Operation] = Operation) -> Select[Any]:
    """Return the query for positions of all operations of the wanted tenant, lane and kind."""
    query = select(table.position)
    if which.tenant is not None:
        query = query.where(table.tenant_id == select(Tenant.id).where(Tenant.name == which.tenant).scalar_subquery())
    if which.lane is not None:
        query = query.where(table.lane == which.lane)
    return query if which.kind is None else query.where(table.kind == which.kind)


async def inspect_operation(session: AsyncSession, operation: str, *, now: datetime) -> InspectedOperation:
    """Return one operation. Raises ``NotFound``."""
    row = (await session.execute(_QUERY.where(Operation.id == operation))).one_or_none()
    if row is None:
        raise NotFound(f"no operation {operation[:100]!r}; `weft operation list` shows those that wait")
    return _inspected(row, now)


async def count_pending(session: AsyncSession, run: str) -> int:
    """Return how many operations of a run are pending."""
    pending = select(func.count()).select_from(Operation).where(Operation.lane == run, IS_PENDING, IS_TRAINING)
    return await session.scalar(pending) or 0


def _inspected(row: Row[Any], now: datetime) -> InspectedOperation:
    found: Operation = row[0]
    return InspectedOperation(
        id=RequestId(found.id),
        tenant=row.tenant,
        lane=found.lane,
        seq_id=found.seq_id,
        kind=OperationKind(found.kind),
        base_model=found.base_model,
        state=OperationState(found.state),
        created_at=found.created_at,
        finished_at=found.finished_at,
        tokens=found.tokens,
        attempts=found.attempts,
        trace_id=found.trace_id,
        error_code=found.error_code,
        error_message=found.error_message,
        wait=_wait(found, row, now) if found.state == OperationState.PENDING else None,
    )


def _wait(found: Operation, row: Row[Any], now: datetime) -> Wait:
    if row.suspended_at is not None:
        return Wait(WaitReason.SUSPENDED, f"its tenant is suspended: {row.suspend_reason or 'no reason given'}")
    if found.kind == OperationKind.SAMPLE:
        return _wait_of_sample(found, row, now)
    if found.seq_id not in (row.next_seq_id, UNLOAD_SEQ_ID):
        return Wait(WaitReason.BEHIND_OTHERS, f"seq_id {row.next_seq_id} of its run comes first")
    if row.trainer_id is None:
        return Wait(WaitReason.NO_TRAINER, "no trainer has its run yet")
    if row.trainer_expires_at is None or row.trainer_expires_at <= now:
        return Wait(
            WaitReason.TRAINER_GONE, f"its trainer {row.trainer_id} is not heard of; another takes the run over"
        )
    return Wait(WaitReason.ITS_TURN, f"trainer {row.trainer_id} has it, or runs it in its turn")


def _wait_of_sample(found: Operation, row: Row[Any], now: datetime) -> Wait:
    if row.replica is not None:
        return Wait(WaitReason.IN_FLIGHT, f"replica {row.replica} draws it since {row.since:%Y-%m-%d %H:%M:%S}")
    gates = (
        ("its adapter's", row.run_mode, row.run_expires_at, row.run_reason),
        ("its base model's", row.pool_mode, row.pool_expires_at, row.pool_reason),
    )
    for name, mode, expires_at, reason in gates:
        if mode is not None and (expires_at is None or expires_at > now):
            return Wait(WaitReason.GATE_CLOSED, f"{name} gate is paused: {reason or 'no reason given'}")
    if found.taken_by is not None:
        return Wait(WaitReason.CLAIMED, f"sampling process {found.taken_by} has claimed it")
    return Wait(WaitReason.ITS_TURN, "it waits for its turn, or for a sampling process of its base model")
