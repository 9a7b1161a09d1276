"""Work before a pending operation, the bound on its wait, and the time that it may take at the speed of the last minutes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, Select, case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from contracts.turn_bounds import (
    SAMPLE_QUANTUM,
    Queue,
    expected_tokens,
    own_tokens_before,
    passes_until_served,
    tokens_before,
)
from contracts.waiting import Ahead, Wait, WaitReason
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.tables import Operation, PoolState, Run, Tenant, WorkerProcess
from tenants.shares import weight

_PASS_KINDS = (OperationKind.FORWARD.value, OperationKind.FORWARD_BACKWARD.value)
_MOST_MEASURED = 512
"""Operations that ended last, among which the speed is measured."""
_MEASURED = timedelta(minutes=5)
_KEPT = timedelta(seconds=1)
"""Age up to which the sums of a queue are told again."""
_QUEUED = frozenset({WaitReason.TURN, WaitReason.NO_ROOM})
"""Reasons with which the tenants' turns decide what comes next."""


@dataclass(frozen=True, slots=True)
class _Reading:
    at: datetime
    sums: Sequence[Row[Any]]


class QueueSums:
    """Sums of what waits for a base's pools or for a trainer, by tenant: one reading a second, however many ask."""

    def __init__(self) -> None:
        """Begin without readings."""
        self._readings: dict[tuple[str, str | None], _Reading] = {}
        self._lock = asyncio.Lock()

    async def of(self, session: AsyncSession, row: Row[Any], now: datetime) -> Sequence[Row[Any]]:
        """Return the sums of the queue that the operation of ``row`` is in, at most a second old."""
        place = (row.base_model, None if row.kind == OperationKind.SAMPLE else row.trainer_id)
        async with self._lock:
            self._readings = {of: one for of, one in self._readings.items() if abs(now - one.at) < _KEPT}
            if place not in self._readings:
                tokens = _tokens(row)
                columns = (func.count().label("operations"), func.sum(tokens).label("tokens"))
                found = await session.execute(_queue(row, *columns, func.max(tokens).label("longest")))
                self._readings[place] = _Reading(now, found.all())
            return self._readings[place].sums


async def work_ahead(
    session: AsyncSession, operation: RequestId, wait: Wait, sums: QueueSums, *, now: datetime
) -> Ahead | None:
    """Return what is before the operation, or before the one of its run that comes first.

    None where no turn is waited for: it runs, or something else than others' work stands before it. What is told of others is
    rounded, so that a tenant beside a single other one cannot read its queue.
    """
    row = await _row(session, wait.front or operation) if wait.cause in _QUEUED else None
    if row is None:
        return None
    is_sample = row.kind == OperationKind.SAMPLE
    if not is_sample and row.kind not in _PASS_KINDS:
        return Ahead(0, 0, 0, 0)
    others = [one for one in await sums.of(session, row, now) if one.tenant_id != row.tenant_id]
    mine = await _mine(session, row)
    tokens = 0 if mine is None else mine.tokens
    ahead = Ahead(
        own_operations=0 if mine is None else mine.operations - 1,
        own_tokens=tokens,
        other_operations=_rounded(sum(int(one.operations) for one in others)),
        other_tokens=_rounded(sum(int(one.tokens) for one in others)),
    )
    if mine is None:
        return ahead
    longest = max([mine.longest, *(_rounded(int(one.longest)) for one in others)])
    queue = Queue(mine.share, [one.share for one in others], tokens, longest)
    ahead = await _timed(session, row, ahead, queue, own_waiting=mine.waiting, since=wait.since, now=now)
    if not is_sample:
        return replace(ahead, bound_passes=passes_until_served(queue, row.capacity)) if row.capacity else ahead
    pools = await _working_pools(session, row.base_model, now)
    return replace(ahead, bound_tokens=tokens_before(queue, SAMPLE_QUANTUM, pools)) if pools else ahead


def _rounded(number: int) -> int:
    """Return the least power of two that is not less, 0 for 0: a bound that is computed from it holds."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


async def _row(session: AsyncSession, operation: RequestId) -> Row[Any] | None:
    columns: tuple[Any, ...] = (
        Operation.position,
        Operation.lane,
        Operation.tenant_id,
        Operation.kind,
        Operation.base_model,
        Run.trainer_id,
        WorkerProcess.capacity,
    )
    query = (
        select(*columns)
        .join(Run, Run.id == Operation.lane, isouter=True)
        .join(WorkerProcess, WorkerProcess.id == Run.trainer_id, isouter=True)
        .where(Operation.id == operation, IS_PENDING)
    )
    return (await session.execute(query)).one_or_none()


@dataclass(frozen=True, slots=True)
class _Mine:
    """Part of a tenant in the queue that one of its operations is in.

    - ``operations``, ``tokens``: up to and including the operation, in the order in which they are served, at most.
    - ``waiting``: tokens of all that it has there. ``longest``: most tokens of one operation.
    """

    share: float
    operations: int
    tokens: int
    waiting: int
    longest: int


async def _mine(session: AsyncSession, row: Row[Any]) -> _Mine | None:
    """Return what the operation's tenant has in its queue, None if the operation is in none."""
    tokens, is_before = _tokens(row), Operation.position <= row.position
    columns = (
        func.count().filter(is_before).label("operations"),
        func.coalesce(func.sum(tokens).filter(is_before), 0).label("tokens"),
        func.sum(tokens).label("waiting"),
        func.max(tokens).label("longest"),
    )
    query = _queue(row, *columns).where(Operation.tenant_id == row.tenant_id)
    if row.kind != OperationKind.SAMPLE:
        query = query.add_columns(Run.id.label("run"), Run.weight.label("weight")).group_by(Run.id, Run.weight)
    found = (await session.execute(query)).all()
    operations = sum(one.operations for one in found)
    if not operations:
        return None
    before = sum(int(one.tokens) for one in found)
    if row.kind != OperationKind.SAMPLE and any(one.weight != 1 for one in found):
        own = next(one for one in found if one.run == row.lane)
        others = [(one.weight, int(one.longest)) for one in found if one.run != row.lane]
        before = own_tokens_before(int(own.tokens), own.weight, others)
    waiting, longest = sum(int(one.waiting) for one in found), max(int(one.longest) for one in found)
    return _Mine(found[0].share, operations, before, waiting, longest)


def _tokens(row: Row[Any]) -> Any:
    """Return what an operation of the queue counts. A sample costs at least one token."""
    if row.kind != OperationKind.SAMPLE:
        return Operation.tokens
    return case((Operation.reserved_tokens > 0, Operation.reserved_tokens), else_=1)


def _queue(row: Row[Any], *columns: Any) -> Select[Any]:
    """Return the query by tenant over samples of the base that nobody has claimed, or passes that wait for the run's trainer."""
    query = (
        select(Operation.tenant_id, weight(Tenant), *columns)
        .join(Tenant, Tenant.id == Operation.tenant_id)
        .where(IS_PENDING, Operation.base_model == row.base_model, Tenant.suspended_at.is_(None))
        .group_by(Operation.tenant_id, Tenant.share, Tenant.service_class)
    )
    if row.kind == OperationKind.SAMPLE:
        return query.where(IS_SAMPLE, Operation.taken_by.is_(None), Operation.held_by.is_(None))
    of_trainer = (IS_TRAINING, Operation.kind.in_(_PASS_KINDS), Run.trainer_id == row.trainer_id)
    return query.join(Run, Run.id == Operation.lane).where(*of_trainer)


async def _timed(
    session: AsyncSession,
    row: Row[Any],
    ahead: Ahead,
    queue: Queue,
    *,
    own_waiting: int,
    since: datetime,
    now: datetime,
) -> Ahead:
    """Add the time that the tokens before the operation and its own take, if two have ended while this one waits."""
    is_sample = row.kind == OperationKind.SAMPLE
    tokens = Operation.reserved_tokens if is_sample else Operation.tokens
    kinds = (OperationKind.SAMPLE.value,) if is_sample else _PASS_KINDS
    last = (
        select(tokens.label("tokens"), Operation.finished_at)
        .where(
            Operation.finished_at > max(since, now - _MEASURED),
            Operation.pruned_at.is_(None),
            Operation.base_model == row.base_model,
            Operation.kind.in_(kinds),
            Operation.state == OperationState.DONE,
        )
        .order_by(Operation.finished_at.desc())
        .limit(_MOST_MEASURED)
    )
    if not is_sample:
        last = last.join(Run, Run.id == Operation.lane).where(Run.trainer_id == row.trainer_id)
    ended = (await session.execute(last)).all()
    seconds = (ended[0].finished_at - ended[-1].finished_at).total_seconds() if ended else 0.0
    if seconds <= 0:
        return ahead
    # Those that ended first were begun at an unknown time.
    speed = sum(one.tokens for one in ended if one.finished_at > ended[-1].finished_at) / seconds
    if not speed:
        return ahead
    speed = float(f"{speed:.2g}")
    capacity = None if is_sample else row.capacity
    until = expected_tokens(queue, others_rounded=ahead.other_tokens, own_waiting=own_waiting, pass_tokens=capacity)
    return replace(ahead, tokens_per_second=speed, eta_seconds=until / speed)


async def _working_pools(session: AsyncSession, base_model: str, now: datetime) -> int:
    query = select(func.count()).where(
        WorkerProcess.kind == "pool",
        WorkerProcess.base_model == base_model,
        WorkerProcess.expires_at > now,
        WorkerProcess.pool_state == PoolState.WORKING,
    )
    return await session.scalar(query) or 0
