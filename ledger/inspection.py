"""Inspection of operations, for operators and their tenants: which there are, in what state, and what a pending one waits for."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, bindparam, func, literal_column, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from contracts.errors import NotFound
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind, known_kind
from contracts.waiting import Wait
from ledger.waiting import Waits
from store.batcher import few_lengths
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.tables import Operation, Run, RunState, Sampler, Session, Tenant
from tenants.budgets import SpentBudget, first_spent, payer_of
from tenants.reach import Owner, tenant_of, within
from tenants.runs import run_standing

MOST_OPERATIONS = 500
"""Operations that one query returns at most."""
SEARCHED = 10_000
"""Operations accepted last, among which done ones are looked for: no index finds those of one tenant or kind."""


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
    """Choice of operations; None takes any. ``tenant`` is a name, ``lane`` the id of a run or sampler.

    ``after`` is the last operation of the page before. ``owner`` has no operations but its own.
    """

    state: OperationState = OperationState.PENDING
    tenant: str | None = None
    lane: str | None = None
    kind: OperationKind | None = None
    after: str | None = None
    owner: Owner | None = None


_COLUMNS: tuple[Any, ...] = (Operation, Tenant.name.label("tenant"))
_QUERY: Select[Any] = select(*_COLUMNS).join(Tenant, Tenant.id == Operation.tenant_id)


async def list_operations(
    session: AsyncSession, which: OperationFilter, *, most: int, waits: Waits
) -> list[InspectedOperation]:
    """Return at most ``most`` operations: pending ones oldest first, others newest first.

    Done operations are looked for in the lane, or else among the ``SEARCHED`` that were accepted last. Raises ``NotFound`` for
    an ``after`` that is no operation.
    """
    last = None if which.after is None else await _position(session, which.after, which.owner)
    most = min(most, MOST_OPERATIONS)
    oldest_first = which.state is OperationState.PENDING
    found = sorted(await session.scalars(_chosen(which, most, last)), reverse=not oldest_first)
    if not found:
        return []
    # Two queries: a plan of both together may read whole tables to join them.
    rows = (await session.execute(_QUERY.where(Operation.position.in_(few_lengths(found[:most]))))).all()
    pending = [RequestId(row[0].id) for row in rows if row[0].state == OperationState.PENDING]
    why = await waits.of_all(session, pending)
    inspected = {row[0].position: _inspected(row, why.get(row[0].id)) for row in rows}
    return [inspected[position] for position in found if position in inspected]


async def _position(session: AsyncSession, operation: str, owner: Owner | None) -> int:
    own = [] if owner is None else [Operation.tenant_id == tenant_of(owner)]
    position = await session.scalar(select(Operation.position).where(Operation.id == operation, *own))
    if position is None:
        raise _no_operation(operation)
    return position


def _chosen(which: OperationFilter, most: int, last: int | None) -> Any:
    """Return the query for positions of the operations; each part of it reads an index of just such operations."""
    if which.state is OperationState.PENDING:
        # An expression: an index of positions would be walked past all that is not pending.
        place = Operation.position + 0
        oldest = (
            _matching(which).where(IS_PENDING, *([] if last is None else [place > last])).order_by(place).limit(most)
        )
        return union_all(*(oldest.where(kinds).subquery().select() for kinds in (IS_SAMPLE, IS_TRAINING)))
    # A literal, as in the partial indexes.
    is_in_state: Any = literal_column(f"'{which.state.value}'")
    if which.lane is not None:
        of_lane = _matching(which).where(Operation.state == is_in_state, *_before(Operation, last))
        return of_lane.order_by(Operation.seq_id.desc()).limit(most)
    if which.state is OperationState.FAILED:
        failed = _matching(which).where(Operation.state == is_in_state, *_before(Operation, last))
        return failed.order_by(Operation.position.desc()).limit(most)
    # Read whole before any is chosen. A condition on the position would be estimated as a third of the table.
    newest = aliased(Operation, select(Operation).order_by(Operation.position.desc()).limit(SEARCHED).subquery())
    done = _matching(which, newest).where(newest.state == is_in_state, *_before(newest, last))
    return done.order_by(newest.position.desc()).limit(most)


def _before(table: type[Operation], last: int | None) -> list[ColumnElement[bool]]:
    return [] if last is None else [table.position < last]


def _matching(which: OperationFilter, table: type[Operation] = Operation) -> Select[Any]:
    """Return the query for positions of all operations of the wanted tenant, lane and kind."""
    query = select(table.position)
    if which.tenant is not None:
        query = query.where(table.tenant_id == select(Tenant.id).where(Tenant.name == which.tenant).scalar_subquery())
    if which.lane is not None:
        query = query.where(table.lane == which.lane)
    if which.owner is not None:
        query = query.where(table.tenant_id == tenant_of(which.owner), *lanes_within(which.owner, table))
    return query if which.kind is None else query.where(table.kind == which.kind)


def lanes_within(owner: Owner, table: type[Operation] = Operation) -> list[ColumnElement[bool]]:
    """Return the conditions under which the operations of the owner's tenant are in the owner's projects."""
    runs, samplers = within(owner, Run.session_id), within(owner, Sampler.session_id)
    if not runs:
        return []
    return [or_(table.lane.in_(select(Run.id).where(*runs)), table.lane.in_(select(Sampler.id).where(*samplers)))]


async def inspect_operation(session: AsyncSession, operation: str, *, waits: Waits) -> InspectedOperation:
    """Return one operation. Raises ``NotFound``."""
    row = (await session.execute(_QUERY.where(Operation.id == operation))).one_or_none()
    if row is None:
        raise _no_operation(operation)
    why = await waits.of_all(session, [RequestId(row[0].id)])
    return _inspected(row, why.get(row[0].id))


async def front_of_run(session: AsyncSession, run: Run) -> RequestId | None:
    """Return the run's pending operation that was sent first, by its number; None if nothing of it is pending."""
    # All before ``next_seq_id`` is final: naming it spares a read of the whole lane.
    which = (Operation.lane == run.id, Operation.seq_id >= run.next_seq_id, IS_PENDING)
    found = await session.scalar(select(Operation.id).where(*which).order_by(Operation.seq_id).limit(1))
    return None if found is None else RequestId(found)


_last_key = (
    select(Operation.key_id)
    .where(Operation.lane == Run.id, Operation.key_id.is_not(None))
    .order_by(Operation.seq_id.desc())
    .limit(1)
    .correlate(Run)
    .scalar_subquery()
)
_PAYER = (
    select(payer_of(func.coalesce(_last_key, Session.key_id)))
    .select_from(Run)
    .join(Session, Session.id == Run.session_id)
    .where(Run.id == bindparam("run"))
)
"""Finds the key that pays for a run: that of its last request, or of its session once no request is kept."""


async def refusing_budget(session: AsyncSession, run: Run, now: datetime) -> SpentBudget | None:
    """Return a spent budget for which new passes of the run are refused; None for a run that has ended."""
    standing = await run_standing(session, TenantId(run.tenant_id), run.id, now)
    has_ended = standing.session_end_reason is not None or standing.state not in (RunState.CREATING, RunState.READY)
    if standing.spent_budgets is None or has_ended:
        return None
    return first_spent(standing.spent_budgets, await session.scalar(_PAYER, {"run": run.id}), standing.project)


def _no_operation(operation: str) -> NotFound:
    return NotFound(f"no operation {operation[:100]!r}; `weft operation list` shows those that wait")


async def count_pending(session: AsyncSession, run: str) -> int:
    """Return how many operations of a run are pending."""
    pending = select(func.count()).select_from(Operation).where(Operation.lane == run, IS_PENDING, IS_TRAINING)
    return await session.scalar(pending) or 0


def _inspected(row: Row[Any], wait: Wait | None) -> InspectedOperation:
    found: Operation = row[0]
    return InspectedOperation(
        id=RequestId(found.id),
        tenant=row.tenant,
        lane=found.lane,
        seq_id=found.seq_id,
        kind=known_kind(found.kind),
        base_model=found.base_model,
        state=OperationState(found.state),
        created_at=found.created_at,
        finished_at=found.finished_at,
        tokens=found.tokens,
        attempts=found.attempts,
        trace_id=found.trace_id,
        error_code=found.error_code,
        error_message=found.error_message,
        wait=wait,
    )
