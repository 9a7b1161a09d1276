"""Limits of projects, within those of their tenant: which of them a project has of its own, and how much of each it uses.

A project's limit is counted over the sessions that are in it now, where its tenant's is counted and under the same lock. What
a tenant may not use, none of its projects may: the smaller limit wins. The default project has its tenant's limits alone.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Forbidden, InvalidRequest, NotFound
from contracts.ids import RequestId, TenantId
from contracts.rate_lines import RateScope
from store.batcher import few_lengths
from store.clock import Clock
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.tables import Checkpoint, Operation, Project, Run, RunState, Sampler, Session
from tenants.budgets import budget_keys, spent_budgets
from tenants.limit_use import sum_of
from tenants.limits import MOST, Limits
from tenants.rate_lines import set_line_paces
from tenants.rates import RATE_LIMITS
from tenants.reach import Owner, Reach, tenant_of
from tenants.request_rates import REQUEST_RATE

PENDING_TRAINING = ("pending_operations", "pending_bytes")
COUNTED = ("sessions", "open_runs", *PENDING_TRAINING, "pending_samples", "stored_bytes", "checkpoints")
"""Limits that are counted over a project's sessions."""
RANK = "max_rank"
PROJECT_LIMITS = (*COUNTED, RANK, "checkpoint_seconds", "kept_checkpoints", *RATE_LIMITS, REQUEST_RATE)
"""Limits that a project may have of its own, named as its tenant's."""


@dataclass(frozen=True, slots=True)
class ProjectUse:
    """A project that has limits of its own, and how much of them it uses, by name. Only what was asked for is counted."""

    id: str
    name: str
    limits: Mapping[str, int]
    used: dict[str, int]

    def has_room(self, name: str, coming: int = 1) -> bool:
        """Tell whether ``coming`` more fit."""
        return coming <= self.room(name)

    def room(self, name: str) -> float:
        """Return how many more fit; below 0 after the limit was lowered."""
        return self.limits[name] - self.used[name] if name in self.limits else inf


def smaller(tenants: int, projects: int | None) -> int:
    """Return the smaller of two bounds, of which 0 is none."""
    return min((bound for bound in (tenants, projects or 0) if bound), default=0)


def training_limits(limits: Limits, own: Mapping[str, int] | None) -> Limits:
    """Return a tenant's limits with those of pending training that its project has smaller."""
    given = own or {}
    return limits.with_own(
        {name: min(getattr(limits, name), given[name]) for name in PENDING_TRAINING if name in given}
    )


def check_rank_in(name: str | None, limits: Mapping[str, int] | None, rank: int) -> None:
    """Raise ``Forbidden`` for an adapter of a higher rank than the own limit of the project of that name."""
    most = (limits or {}).get(RANK, rank)
    if rank > most:
        raise Forbidden(f"adapters of project {name!r} are of rank {most} at most; got rank {rank}")


_PROJECT = Session.project == bindparam("project", unique=False)


def _runs(counted: Any) -> Select[Any]:
    return select(counted).select_from(Run).join(Session, Session.id == Run.session_id).where(_PROJECT)


def _checkpoints(counted: Any) -> Select[Any]:
    return _runs(counted).join(Checkpoint, Checkpoint.run_id == Run.id)


def _is_of_project(lanes: type[Run] | type[Sampler]) -> ColumnElement[bool]:
    """Return whether the operation's lane is one of the project's."""
    made_in = select(lanes.id).join(Session, Session.id == lanes.session_id)
    return made_in.where(lanes.id == Operation.lane, _PROJECT).correlate(Operation).exists()


_IS_OF_TENANT = Operation.tenant_id == bindparam("tenant", unique=False)
_IS_PENDING_TRAINING = (_IS_OF_TENANT, IS_PENDING, IS_TRAINING, _is_of_project(Run))
_OLDEST_PENDING = select(Operation.id).where(*_IS_PENDING_TRAINING).order_by(Operation.position).limit(1)
_COUNTS: Mapping[str, Any] = {
    "sessions": select(func.count()).select_from(Session).where(_PROJECT, Session.ended_at.is_(None)).scalar_subquery(),
    "open_runs": _runs(func.count()).where(Run.state == RunState.READY, Session.ended_at.is_(None)).scalar_subquery(),
    "pending_operations": select(func.count()).select_from(Operation).where(*_IS_PENDING_TRAINING).scalar_subquery(),
    "pending_bytes": select(sum_of(Operation.payload_bytes)).where(*_IS_PENDING_TRAINING).scalar_subquery(),
    # Counted from the tenant's pending samples: a sampler's lane holds every operation that is kept.
    "pending_samples": select(func.count())
    .select_from(Operation)
    .where(_IS_OF_TENANT, IS_PENDING, IS_SAMPLE, _is_of_project(Sampler))
    .scalar_subquery(),
    "stored_bytes": _checkpoints(sum_of(Checkpoint.size_bytes)).scalar_subquery()
    + _runs(sum_of(Run.snapshot_bytes)).where(Run.snapshot_dir.is_not(None)).scalar_subquery(),
    "checkpoints": _checkpoints(func.count()).scalar_subquery(),
}
_HAS_LIMITS = (Project.tenant_id == bindparam("tenant"), Project.limits.is_not(None))
_COLUMNS = (Project.id, Project.tenant_id, Project.name, Project.limits)
_OF_SESSION = (
    select(*_COLUMNS)
    .join(Session, Session.project == Project.id)
    .where(Session.id == bindparam("session_id"), *_HAS_LIMITS)
)
_OF_PROJECT = select(*_COLUMNS).where(Project.id == bindparam("project"), *_HAS_LIMITS)
_OF_SAMPLERS = (
    select(Sampler.id.label("lane"), *_COLUMNS)
    .join(Session, Session.id == Sampler.session_id)
    .join(Project, Project.id == Session.project)
    .where(Sampler.id.in_(bindparam("lanes", expanding=True)), Project.limits.is_not(None))
)
_OF_SESSIONS = (
    select(Session.id.label("session_id"), *_COLUMNS)
    .join(Project, Project.id == Session.project)
    .where(Session.id.in_(bindparam("sessions", expanding=True)), Project.limits.is_not(None))
)
_NAMED = select(Project.id, Project.limits).where(
    Project.tenant_id == bindparam("tenant"),
    (Project.id == bindparam("project", unique=False)) | (Project.name == bindparam("project", unique=False)),
)
_AMONG = (
    select(*_COLUMNS)
    .where(Project.tenant_id == bindparam("tenant"), Project.id.in_(bindparam("projects", expanding=True)))
    .order_by(Project.id)
)
_OF_TENANT = select(*_COLUMNS).where(*_HAS_LIMITS).order_by(Project.id)


async def use_in_session(
    session: AsyncSession, tenant: TenantId, session_id: str, names: Collection[str]
) -> ProjectUse | None:
    """Return the use of the project that a session is in, None where that has no limits of its own."""
    row = (await session.execute(_OF_SESSION, {"tenant": tenant, "session_id": session_id})).one_or_none()
    return None if row is None else await _counted(session, row, names)


async def use_of_project(
    session: AsyncSession, tenant: TenantId, project: str | None, names: Collection[str]
) -> ProjectUse | None:
    """Return the use of a project, None where it has no limits of its own."""
    if project is None:
        return None
    row = (await session.execute(_OF_PROJECT, {"tenant": tenant, "project": project})).one_or_none()
    return None if row is None else await _counted(session, row, names)


async def check_not_overfull(session: AsyncSession, tenant: TenantId, project: str, session_id: str) -> None:
    """Raise ``Forbidden`` if the project with this session in it uses more than its limits, or a run's rank is too high."""
    use = await use_of_project(session, tenant, project, COUNTED)
    if use is None:
        return
    for name in COUNTED:
        if not use.has_room(name, 0):
            raise Forbidden(
                f"project {use.name!r} has no room for this session: it would have {use.used[name]} of {use.limits[name]} "
                f"{name}; end or delete some, or have an administrator move it"
            )
    highest = await session.scalar(select(func.max(Run.rank)).where(Run.session_id == session_id))
    check_rank_in(use.name, use.limits, highest or 0)


def bounds_training(limits: Mapping[str, int] | None) -> bool:
    """Tell whether a project's own limits bound its pending training."""
    return any(name in (limits or {}) for name in PENDING_TRAINING)


async def oldest_pending(session: AsyncSession, tenant: TenantId, project: str) -> RequestId | None:
    """Return the pending training operation of the project that was accepted first."""
    found = await session.scalar(_OLDEST_PENDING, {"tenant": tenant, "project": project})
    return None if found is None else RequestId(found)


async def uses_of_samplers(session: AsyncSession, lanes: Collection[str]) -> dict[str, ProjectUse]:
    """Return the use of the samplers' projects by sampler, of those projects that bound pending samples."""
    rows = (await session.execute(_OF_SAMPLERS, {"lanes": few_lengths(sorted(lanes))})).all()
    found = {row.id: row for row in rows if "pending_samples" in row.limits}
    uses = {id: await _counted(session, row, ["pending_samples"]) for id, row in sorted(found.items())}
    return {row.lane: uses[row.id] for row in rows if row.id in uses}


async def uses_of_sessions(
    session: AsyncSession, sessions: Collection[str], names: Collection[str]
) -> dict[str, ProjectUse]:
    """Return the use of the sessions' projects by session, leaving out projects without limits of their own."""
    rows = (await session.execute(_OF_SESSIONS, {"sessions": few_lengths(sorted(sessions))})).all()
    found = {row.id: row for row in rows}
    uses = {id: await _counted(session, row, names) for id, row in sorted(found.items())}
    return {row.session_id: uses[row.id] for row in rows}


async def named_limits(
    session: AsyncSession, tenant: TenantId, project: str
) -> tuple[str, Mapping[str, int] | None] | None:
    """Return the id and the own limits of the tenant's project of that id or name, None for none and for the default one."""
    row = (await session.execute(_NAMED, {"project": project, "tenant": tenant})).first()
    return None if row is None else (row.id, row.limits)


async def uses_of_projects(session: AsyncSession, tenant: TenantId, projects: Collection[str]) -> list[ProjectUse]:
    """Return those of the projects that are the tenant's, the default one left out, in order of ids. Nothing is counted."""
    rows = await session.execute(_AMONG, {"tenant": tenant, "projects": few_lengths(sorted(projects))})
    return [ProjectUse(row.id, row.name, row.limits or {}, {}) for row in rows]


async def spent_and_limits(
    session: AsyncSession, tenant: TenantId, project: str | None, now: datetime
) -> tuple[str | None, Mapping[str, int] | None]:
    """Return the tenant's spent budgets, in the form of ``spent_budgets``, and the project's own limits."""
    limits = select(Project.limits).where(Project.id == project).scalar_subquery()
    query = select(spent_budgets(literal(tenant)).label("spent"), limits.label("limits"))
    row = (await session.execute(query, budget_keys(now))).one()
    return row.spent, row.limits


async def limited_projects(session: AsyncSession, owner: Owner) -> list[ProjectUse]:
    """Return each project with limits of its own that the owner reaches. Nothing is counted."""
    rows = (await session.execute(_OF_TENANT, {"tenant": tenant_of(owner)})).all()
    reached = [row for row in rows if not isinstance(owner, Reach) or row.id in owner.projects]
    return [ProjectUse(row.id, row.name, row.limits, {}) for row in reached]


@dataclass(frozen=True, slots=True)
class ProjectChange:
    """A project whose limits were set: those before and after."""

    id: str
    name: str
    created_at: datetime
    before: Mapping[str, int]
    limits: Mapping[str, int]


async def set_project_limits(
    transaction: AsyncSession, tenant: TenantId, project: str, limits: Mapping[str, int | None], clock: Clock
) -> ProjectChange:
    """Give a project, named by its id or name, limits of its own, None for none. They hold from its next request on.

    A changed rate holds for what waits already, too.

    Raises ``NotFound`` for a project that is not there or is the default one, ``InvalidRequest`` for a limit that is none.
    """
    for name, value in limits.items():
        if name not in PROJECT_LIMITS:
            raise InvalidRequest(f"no limit of projects is named {name[:50]!r}; those are {', '.join(PROJECT_LIMITS)}")
        if value is not None and not 1 <= value <= MOST:
            raise InvalidRequest(f"{name} must be 1 to {MOST}, or none; got {value}")
    which = select(Project).where(Project.tenant_id == tenant, (Project.id == project) | (Project.name == project))
    found = (await transaction.scalars(which.with_for_update())).one_or_none()
    if found is None:
        raise NotFound(f"no project {project[:100]!r}; the default project has its tenant's limits alone")
    before = dict(found.limits or {})
    after = {name: value for name, value in {**before, **limits}.items() if value is not None}
    await transaction.execute(update(Project).where(Project.id == found.id).values(limits=after or None))
    if any(name in RATE_LIMITS for name in limits):
        await set_line_paces(transaction, tenant, RateScope.PROJECT, found.id, after, clock())
    return ProjectChange(found.id, found.name, found.created_at, before, after)


async def _counted(session: AsyncSession, row: Any, names: Collection[str]) -> ProjectUse:
    counted = [name for name in names if name in row.limits and name in _COUNTS]
    used: dict[str, int] = {}
    if counted:
        query = select(*(_COUNTS[name].label(name) for name in counted))
        used = dict((await session.execute(query, {"project": row.id, "tenant": row.tenant_id})).one()._mapping)
    return ProjectUse(row.id, row.name, row.limits, used)
