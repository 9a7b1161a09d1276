"""Rows that tell why operations wait: one query for any number of operations, every join of it by a unique key."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Row, Select, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from contracts.ids import RequestId, TenantId
from store.batcher import few_lengths
from store.pending_operations import IS_PENDING, IS_SAMPLE
from store.settings import Settings
from store.tables import (
    AdapterGate,
    Checkpoint,
    DirectedRun,
    Operation,
    Placement,
    Run,
    RunEvent,
    RunState,
    SampleInFlight,
    Sampler,
    Tenant,
    WorkerProcess,
)
from tenants.audit import session_of
from tenants.limit_use import LIMITED_PROJECTS, RUN_USE, Use
from tenants.limits import Limits
from tenants.project_limits import ProjectUse, uses_of_sessions
from tenants.rate_holds import Hold, holds_of
from tenants.run_history import RunEventKind
from tenants.runs import open_runs

_TRAINER, _POOL = "trainer", "pool"
"""Kinds of processes."""
_REBUILDS = (RunEventKind.RESTORED.value, RunEventKind.REPLAYED.value)

_trainer = aliased(WorkerProcess)
_run_gate, _pool_gate = aliased(AdapterGate), aliased(AdapterGate)
_front, _before = aliased(Operation), aliased(Operation)


def _event(column: Any, *kinds: str) -> Any:
    """Return a column of the run's newest event of these kinds under its present lease."""
    return (
        select(column)
        .where(RunEvent.run_id == Run.id, RunEvent.lease_token == Run.lease_token, RunEvent.kind.in_(kinds))
        .order_by(RunEvent.id.desc())
        .limit(1)
        .correlate(Run)
        .scalar_subquery()
    )


_sampled_run = func.coalesce(Sampler.live_run_id, Checkpoint.run_id)
_COLUMNS: tuple[Any, ...] = (
    Operation.id,
    Operation.tenant_id,
    Operation.kind,
    Operation.seq_id,
    Operation.lane,
    Operation.base_model,
    Operation.attempts,
    Operation.created_at,
    Operation.taken_by,
    Tenant.suspended_at,
    Tenant.suspend_reason,
    Run.state.label("run_state"),
    Run.next_seq_id,
    Run.trainer_id,
    _front.id.label("front_id"),
    _front.kind.label("front_kind"),
    _front.attempts.label("front_attempts"),
    _front.created_at.label("front_created_at"),
    _before.finished_at.label("before_finished_at"),
    _event(RunEvent.at, RunEventKind.CLAIMED.value).label("claimed_at"),
    _event(RunEvent.at, *_REBUILDS).label("rebuilt_at"),
    _event(RunEvent.kind, *_REBUILDS).label("rebuild"),
    _event(RunEvent.detail, *_REBUILDS).label("rebuild_detail"),
    Placement.created_at.label("placed_at"),
    DirectedRun.wanted.label("directive"),
    DirectedRun.since.label("directed_at"),
    _trainer.expires_at.label("trainer_expires_at"),
    _trainer.drained_at.label("trainer_drained_at"),
    SampleInFlight.replica,
    SampleInFlight.since.label("drawn_since"),
    _run_gate.mode.label("run_mode"),
    _run_gate.since.label("run_since"),
    _run_gate.expires_at.label("run_expires_at"),
    _run_gate.reason.label("run_reason"),
    _sampled_run.label("sampled_run"),
    _pool_gate.mode.label("pool_mode"),
    _pool_gate.since.label("pool_since"),
    _pool_gate.expires_at.label("pool_expires_at"),
    _pool_gate.reason.label("pool_reason"),
)


def _query() -> Any:
    """Return the query. ``front`` is the operation of the run that runs next, if it has come; ``before`` is the one before it."""
    # Without another tenant's checkpoint: its run's gate does not hold the sample, and is not this tenant's to read.
    own_checkpoint = (Checkpoint.id == Sampler.checkpoint_id) & (Checkpoint.tenant_id == Operation.tenant_id)
    return (
        select(*_COLUMNS)
        .join(Tenant, Tenant.id == Operation.tenant_id)
        .join(Run, Run.id == Operation.lane, isouter=True)
        .join(_front, (_front.lane == Run.id) & (_front.seq_id == Run.next_seq_id), isouter=True)
        .join(_before, (_before.lane == Run.id) & (_before.seq_id == Run.next_seq_id - 1), isouter=True)
        .join(Placement, Placement.run_id == Run.id, isouter=True)
        .join(DirectedRun, DirectedRun.run_id == Run.id, isouter=True)
        .join(_trainer, _trainer.id == Run.trainer_id, isouter=True)
        .join(SampleInFlight, SampleInFlight.operation_id == Operation.id, isouter=True)
        .join(Sampler, Sampler.id == Operation.lane, isouter=True)
        .join(Checkpoint, own_checkpoint, isouter=True)
        .join(_run_gate, _run_gate.run_id == _sampled_run, isouter=True)
        .join(_pool_gate, _pool_gate.run_id == "pool:" + Operation.base_model, isouter=True)
        .where(Operation.id.in_(bindparam("ids", expanding=True)), IS_PENDING)
    )


_FACTS: Select[Any] = _query()
_PROCESSES: Any = select(
    WorkerProcess.id,
    WorkerProcess.kind,
    WorkerProcess.base_model,
    WorkerProcess.drained_at,
    WorkerProcess.pool_state,
    WorkerProcess.capacity,
).where(
    WorkerProcess.base_model.in_(bindparam("bases", expanding=True)),
    WorkerProcess.expires_at > bindparam("now"),
    WorkerProcess.ending_at.is_(None),
)
_CLAIMED: Any = (
    select(Operation.taken_by, func.count())
    .where(IS_PENDING, IS_SAMPLE, Operation.taken_by.in_(bindparam("processes", expanding=True)))
    .group_by(Operation.taken_by)
)


@dataclass(frozen=True, slots=True)
class Processes:
    """Living processes of one base model that do not end. ``claimed``: samples that its pools hold."""

    trainers: Sequence[Row[Any]]
    pools: Sequence[Row[Any]]
    claimed: int

    @property
    def room(self) -> int | None:
        """Samples that the pools hold at once; None if one does not say."""
        capacities = [pool.capacity for pool in self.pools]
        return None if not capacities or None in capacities else sum(capacities)


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """Facts about pending operations, read at ``now``.

    - ``rows``: the operations, without those that have ended.
    - ``in_hand``: operations that their trainers compute now. ``uses``: use of the tenants whose runs wait to be made.
    - ``open_adapters``: open runs by base model, for bases with such runs.
    """

    now: datetime
    rows: Sequence[Row[Any]]
    processes: Mapping[str, Processes]
    uses: Mapping[TenantId, Use]
    open_adapters: Mapping[str, int]
    in_hand: Collection[RequestId] = ()
    projects: Mapping[str, ProjectUse | None] = field(default_factory=dict)
    """Use of the projects of runs that wait to be made, by run."""
    holds: Mapping[RequestId, Hold] = field(default_factory=dict)
    """Holds by rates and budgets, of the operations and of those that run next before them."""


async def read_facts(
    session: AsyncSession, ids: Sequence[str], *, settings: Settings, defaults: Limits, now: datetime
) -> WaitFacts:
    """Return the facts about those of the operations that are pending, in few statements however many they are.

    Three statements, and one or two for each rarer wait. Runs that wait to be made cost one statement more, and one for each
    project among them, where projects have limits of their own.
    """
    rows = (await session.execute(_FACTS, {"ids": few_lengths(list(ids))})).all()
    bases = sorted({row.base_model for row in rows})
    processes = await _processes(session, bases, rows, now) if bases else {}
    creating = [row for row in rows if row.run_state == RunState.CREATING]
    tenants = {TenantId(row.tenant_id) for row in creating}
    uses = await RUN_USE.read(session, tenants, defaults) if tenants else {}
    # By run, of tenants that have projects with limits.
    bounded = {
        row.lane: session_of(row.lane) for row in creating if uses[TenantId(row.tenant_id)].used[LIMITED_PROJECTS]
    }
    in_sessions = await uses_of_sessions(session, set(bounded.values()), ["open_runs"]) if bounded else {}
    projects = {run: in_sessions.get(owner) for run, owner in bounded.items()}
    full = {row.base_model for row in creating} if settings.max_adapters is not None else set()
    opened = {base: await open_runs(session, base) for base in sorted(full)}
    concerned = sorted({one for row in rows for one in (row.id, row.front_id) if one is not None})
    holds = await holds_of(session, concerned, now) if concerned else {}
    return WaitFacts(now, rows, processes, uses, opened, holds=holds, projects=projects)


async def _processes(
    session: AsyncSession, bases: Sequence[str], rows: Sequence[Row[Any]], now: datetime
) -> dict[str, Processes]:
    found = (await session.execute(_PROCESSES, {"bases": few_lengths(bases), "now": now})).all()
    pools = sorted(one.id for one in found if one.kind == _POOL)
    claimed: dict[str, int] = {}
    # Whether there is room matters to a sample that nobody has claimed.
    if pools and any(row.run_state is None and row.taken_by is None for row in rows):
        counted = await session.execute(_CLAIMED, {"processes": few_lengths(pools)})
        claimed = {row[0]: row[1] for row in counted}
    return {
        base: Processes(
            trainers=[one for one in found if one.base_model == base and one.kind == _TRAINER],
            pools=[one for one in found if one.base_model == base and one.kind == _POOL],
            claimed=sum(claimed.get(one.id, 0) for one in found if one.base_model == base),
        )
        for base in bases
    }
