"""Training runs: each is one adapter over one base model, owned by one tenant."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from contracts.errors import InvalidRequest, NotFound, RunUnloaded, SessionEnded
from contracts.ids import RunId, SessionId, TenantId
from contracts.operations import LoraSettings, OptimizerName
from store.batcher import few_lengths
from store.clock import Clock
from store.inserts import insert_unless_present
from store.tables import Project, Run, RunState, Session, Tenant
from tenants.audit import session_of
from tenants.budgets import budget_keys, spent_budgets
from tenants.limit_use import LIMITED_PROJECTS, RUN_USE
from tenants.limits import Counted, Limits, hold_count
from tenants.list_places import Place, behind
from tenants.project_limits import bounds_training, use_in_session
from tenants.reach import Owner, default_project, includes, tenant_of, within

_PAGE = 50
"""Runs that are read at once: each may have 16 KiB of metadata, which is decoded on the event loop."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be created. ``lora.seed`` is resolved, never None."""

    session_id: SessionId
    model_seq_id: int
    base_model: str
    lora: LoraSettings
    user_metadata: dict[str, str] | None
    optimizer: OptimizerName = OptimizerName.ADAMW


def run_id_for(session_id: str, model_seq_id: int) -> RunId:
    """Return the run's id, in the form that SDK 0.38 derives by itself."""
    return RunId(f"{session_id}:train:{model_seq_id}")


async def insert_run(transaction: AsyncSession, tenant: TenantId, new: NewRun, clock: Clock) -> bool:
    """Insert the run's row in state ``creating``. Return False, and leave it as it is, if it exists."""
    now = clock()
    if new.lora.seed is None:
        raise ValueError("resolve the seed first")
    run_id = run_id_for(new.session_id, new.model_seq_id)
    values = {
        "id": run_id,
        "tenant_id": tenant,
        "session_id": new.session_id,
        "model_seq_id": new.model_seq_id,
        "base_model": new.base_model,
        "rank": new.lora.rank,
        "alpha": new.lora.alpha,
        "seed": new.lora.seed,
        "train_attn": new.lora.train_attn,
        "train_mlp": new.lora.train_mlp,
        "train_unembed": new.lora.train_unembed,
        "user_metadata": new.user_metadata,
        "optimizer": new.optimizer,
        "state": RunState.CREATING,
        "next_seq_id": 0,
        "snapshot_seq_id": -1,
        "created_at": now,
        "last_request_at": now,
    }
    inserted = insert_unless_present(transaction, Run).values(values).returning(Run.id)
    return await transaction.scalar(inserted) is not None


def lora_settings(run: Run | Row[Any]) -> LoraSettings:
    """Return the adapter's recorded settings, with the seed resolved."""
    return LoraSettings(
        rank=run.rank,
        alpha=run.alpha,
        seed=run.seed,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
    )


async def get_run(session: AsyncSession, owner: Owner, run_id: str) -> Run:
    """Return the owner's run in any state. Raises ``NotFound``."""
    found = await session.scalar(select(Run).where(Run.id == run_id, *_owned(owner)))
    if found is None:
        raise NotFound(f"no model {run_id[:150]!r}")
    return found


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Tenant and project that a run is in. ``project`` is None for the tenant's default project."""

    tenant: TenantId
    project: str | None

    def is_reached_by(self, owner: Owner) -> bool:
        """Return whether the run is the owner's."""
        return self.tenant == tenant_of(owner) and includes(owner, self.project)


async def run_places(session: AsyncSession, runs: Collection[str]) -> dict[str, RunPlace]:
    """Return the places of those of the runs, of any tenants, that exist."""
    query = select(Run.id, Run.tenant_id, Session.project).join(Session, Session.id == Run.session_id)
    rows = await session.execute(query.where(Run.id.in_(few_lengths(sorted(runs)))))
    return {run: RunPlace(TenantId(tenant), project) for run, tenant, project in rows}


@dataclass(frozen=True, slots=True)
class RunStanding:
    """State of a run, as far as a request needs it. ``trainer`` is the process that leases the run."""

    id: RunId
    base_model: str
    state: RunState
    session_end_reason: str | None
    trainer: str | None
    next_seq_id: int
    """seq_id of the operation that may run next."""
    own_limits: Mapping[str, int] | None
    """Limits that the tenant has of its own."""
    optimizer: str
    """An ``OptimizerName``, or one that only another version knows."""
    project: str
    """Project that the run's session is in."""
    spent_budgets: str | None
    """Budgets of the tenant and its keys that are spent (``tenants.budgets.first_spent``)."""
    project_limits: Mapping[str, int] | None = None
    """Limits that the project has of its own."""

    @property
    def bounding_project(self) -> str | None:
        """Project, if it bounds its pending training itself."""
        return self.project if bounds_training(self.project_limits) else None

    def check_open(self) -> None:
        """Raise ``RunUnloaded`` or ``SessionEnded`` unless the run accepts work."""
        if self.state is RunState.UNLOADED:
            raise RunUnloaded(f"model {self.id} was unloaded; create another, or load a checkpoint of it")
        if self.state is RunState.FAILED:
            raise RunUnloaded(f"model {self.id} was never made: its creation failed")
        if self.session_end_reason is not None:
            raise SessionEnded(f"the session of model {self.id} has ended ({self.session_end_reason}); open a new one")


# Built once: every training request begins with this query.
_STANDING = (
    select(
        Run.__table__.c.base_model,
        Run.__table__.c.state,
        Run.__table__.c.trainer_id,
        Run.__table__.c.next_seq_id,
        Run.__table__.c.optimizer,
        Session.__table__.c.end_reason,
        Session.__table__.c.project,
        Tenant.__table__.c.limits,
        Project.__table__.c.limits.label("project_limits"),
        spent_budgets(Run.__table__.c.tenant_id).label("spent_budgets"),
    )
    .join_from(Run.__table__, Session.__table__, Session.__table__.c.id == Run.__table__.c.session_id)
    .join(Tenant.__table__, Tenant.__table__.c.id == Run.__table__.c.tenant_id)
    .outerjoin(Project.__table__, Project.__table__.c.id == Session.__table__.c.project)
    .where(Run.__table__.c.id == bindparam("run"), Run.__table__.c.tenant_id == bindparam("tenant"))
)


async def run_standing(session: AsyncSession, owner: Owner, run_id: str, now: datetime) -> RunStanding:
    """Return the state of the owner's run. Raises ``NotFound``."""
    keys = {"run": run_id, "tenant": tenant_of(owner), **budget_keys(now)}
    row = (await session.execute(_STANDING, keys)).one_or_none()
    if row is None or not includes(owner, row.project):
        raise NotFound(f"no model {run_id[:150]!r}")
    return RunStanding(
        id=RunId(run_id),
        base_model=row.base_model,
        state=RunState(row.state),
        session_end_reason=row.end_reason,
        trainer=row.trainer_id,
        next_seq_id=row.next_seq_id,
        own_limits=row.limits,
        optimizer=row.optimizer,
        project=row.project or default_project(tenant_of(owner)),
        spent_budgets=row.spent_budgets,
        project_limits=row.project_limits,
    )


async def open_runs(session: AsyncSession, base_model: str) -> int:
    """Count all tenants' trainable runs of the base model: ready, in a session that has not ended."""
    query = (
        select(func.count())
        .select_from(Run)
        .join(Session, Session.id == Run.session_id)
        .where(Run.base_model == base_model, Run.state == RunState.READY, Session.ended_at.is_(None))
    )
    return await session.scalar(query) or 0


async def open_run_within_limit(transaction: AsyncSession, tenant: TenantId, run_id: str, defaults: Limits) -> bool:
    """Make the tenant's run ready, unless the tenant or the run's project may open none more now: return False."""
    await hold_count(transaction, Counted.RUNS, [tenant])
    use = await RUN_USE.of(transaction, tenant, defaults)
    if not use.may_open_run:
        return False
    if use.used[LIMITED_PROJECTS]:
        project = await use_in_session(transaction, tenant, session_of(run_id), ["open_runs"])
        if project is not None and not project.has_room("open_runs"):
            return False
    await set_run_state(transaction, tenant, run_id, RunState.READY)
    return True


async def list_runs(
    session: AsyncSession,
    owner: Owner,
    *,
    limit: int,
    offset: int,
    after: Place | None = None,
    bases: Collection[str] | None = None,
) -> tuple[list[Run], int]:
    """Return a page of the owner's runs, newest first, without what their users tell of them, and the total of all.

    The page begins behind ``after``. ``bases``: runs of these base models alone.
    """
    told = (defer(Run.user_metadata, raiseload=True), defer(Run.metric_names, raiseload=True))
    page = _newest_runs(owner, after, bases).options(*told).limit(limit).offset(offset)
    return list(await session.scalars(page)), await total_runs(session, owner, bases)


async def total_runs(session: AsyncSession, owner: Owner, bases: Collection[str] | None = None) -> int:
    """Count the owner's runs, in any state. ``bases``: those of these base models alone."""
    return await session.scalar(select(func.count()).select_from(Run).where(*_owned(owner, bases))) or 0


async def run_pages(
    session: AsyncSession, owner: Owner, *, limit: int, offset: int = 0, bases: Collection[str] | None = None
) -> AsyncIterator[Sequence[Run]]:
    """Iterate over at most ``limit`` of the owner's runs behind the newest ``offset``, newest first, in pages.

    ``bases``: runs of these base models alone.
    """
    after: Place | None = None
    while limit > 0:
        most = min(_PAGE, limit)
        rows = (await session.scalars(_newest_runs(owner, after, bases).limit(most).offset(offset))).all()
        yield rows
        if len(rows) < most:
            return
        after, offset, limit = Place.of(rows[-1]), 0, limit - most


def _owned(owner: Owner, bases: Collection[str] | None = None) -> list[ColumnElement[bool]]:
    of_bases = [] if bases is None else [Run.base_model.in_(few_lengths(sorted(bases)))]
    return [Run.tenant_id == tenant_of(owner), *within(owner, Run.session_id), *of_bases]


def _newest_runs(owner: Owner, after: Place | None, bases: Collection[str] | None) -> Select[Run]:
    place = behind(Run.created_at, Run.id, after)
    return select(Run).where(*_owned(owner, bases), *place).order_by(Run.created_at.desc(), Run.id)


async def set_run_state(transaction: AsyncSession, tenant: TenantId, run_id: str, state: RunState) -> None:
    """Write the state of the tenant's run."""
    await transaction.execute(update(Run).where(Run.id == run_id, Run.tenant_id == tenant).values(state=state))


_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 100.0


async def weigh_run(transaction: AsyncSession, run: Run, weight: float) -> float:
    """Give the run a weight among its tenant's runs, and return the one that it had. Raises ``InvalidRequest``."""
    if not _LEAST_WEIGHT <= weight <= _MOST_WEIGHT:
        raise InvalidRequest(f"weight must be {_LEAST_WEIGHT} to {_MOST_WEIGHT:.0f}; got {weight}")
    before = run.weight
    run.weight = weight
    await transaction.flush()
    return before
