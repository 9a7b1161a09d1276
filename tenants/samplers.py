"""Samplers: the wire's sampling sessions, each with the weights that it samples from.

A sampler is pinned to a checkpoint, follows a run's newest version (live), or samples the bare base model.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, cast

from sqlalchemy import Table, and_, bindparam, exists, func, or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound, SequenceConflict, SessionEnded, WeftError
from contracts.ids import CheckpointId, RunId, SamplerId, SessionId, TenantId
from contracts.paths import CheckpointPath, Segment
from contracts.stored_words import known
from store.batcher import Batcher, few_lengths
from store.clock import Clock
from store.database import Database
from store.inserts import insert_unless_present
from store.tables import Checkpoint, Project, Sampler, Session
from tenants.audit import Actor, record
from tenants.audit_actions import Action
from tenants.budgets import budget_keys, spent_budgets
from tenants.limits import Counted, Limits, hold_count
from tenants.reach import Owner, includes, tenant_of, within
from tenants.sessions import live_session


class OnStale(StrEnum):
    """Treatment of a sample that fell too far behind: ``fail`` it, or ``restart`` it on the newest version."""

    FAIL = "fail"
    RESTART = "restart"


class SwapPolicy(StrEnum):
    """Fate of a live sampler's samples in flight when a version is published: ``continue`` on it, or ``finish`` on theirs."""

    CONTINUE = "continue"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Staleness:
    """Bound on the number of publications by which a live sampler's samples may fall behind after their first token."""

    max_version_lag: int
    on_stale: OnStale


@dataclass(frozen=True, slots=True)
class NewSampler:
    """A sampler to be created: of a checkpoint, live on a run, or of the bare base (both None)."""

    session_id: SessionId
    sampling_session_seq_id: int
    base_model: str
    model_path: str | None = None
    checkpoint_id: CheckpointId | None = None
    live_run_id: RunId | None = None


@dataclass(frozen=True, slots=True)
class SamplerStanding:
    """State of a sampler, as far as a request needs it.

    ``obstacle`` is the error for new samples, None if the sampler accepts them.
    """

    id: SamplerId
    base_model: str
    obstacle: SessionEnded | NotFound | None
    project: str | None
    """Project of the sampler's session, as its row has it."""
    spent_budgets: str | None = None
    """Budgets of the tenant and its keys that are spent (``tenants.budgets.first_spent``)."""
    project_limits: Mapping[str, int] | None = None
    """Limits that the project has of its own."""
    shared_by: tuple[TenantId, CheckpointPath] | None = None
    """Another tenant whose checkpoint it samples, and that checkpoint."""


_IS_UNEXPIRED = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > bindparam("now"))
_STANDING = (
    select(
        Sampler.id,
        Sampler.tenant_id,
        Sampler.base_model,
        Sampler.session_id,
        Sampler.checkpoint_id,
        Session.ended_at,
        Session.end_reason,
        Session.project,
        Project.limits.label("project_limits"),
        Checkpoint.id.label("unexpired_checkpoint"),
        Checkpoint.tenant_id.label("owner"),
        Checkpoint.run_id.label("of_run"),
        Checkpoint.segment,
        Checkpoint.name,
        spent_budgets(Sampler.tenant_id.expression).label("spent_budgets"),
    )
    .join(Session, and_(Session.id == Sampler.session_id, Session.tenant_id == Sampler.tenant_id))
    .outerjoin(Project, Project.id == Session.project)
    .outerjoin(
        Checkpoint,
        and_(
            Checkpoint.id == Sampler.checkpoint_id,
            or_(Checkpoint.tenant_id == Sampler.tenant_id, Checkpoint.public == true()),
            _IS_UNEXPIRED,
        ),
    )
    .where(Sampler.id.in_(bindparam("ids", expanding=True)))
)
# Locked in the same order as dispatches lock them, which prevents deadlocks.
_BEHIND = (
    select(Sampler.id)
    .where(
        Sampler.tenant_id == bindparam("tenant"),
        Sampler.live_run_id == bindparam("run"),
        Sampler.checkpoint_id.is_distinct_from(bindparam("version")),
    )
    .order_by(Sampler.id)
    .with_for_update()
)
_PUBLISH = (
    update(cast(Table, Sampler.__table__))
    .where(
        Sampler.id.in_(_BEHIND),
        exists().where(
            Checkpoint.id == bindparam("version"), Checkpoint.tenant_id == bindparam("tenant"), _IS_UNEXPIRED
        ),
    )
    .values(checkpoint_id=bindparam("version"), publications=Sampler.publications + 1)
    .returning(Sampler.id)
)

_NUMBER = select(func.count()).select_from(Sampler).where(Sampler.session_id == bindparam("session"))


def sampler_id_for(session_id: str, sampling_session_seq_id: int) -> SamplerId:
    """Return the sampler's id, in the form that the public docs show."""
    return SamplerId(f"{session_id}:sample:{sampling_session_seq_id}")


async def get_sampler(session: AsyncSession, owner: Owner, sampler_id: str) -> Sampler:
    """Return the owner's sampler. Raises ``NotFound``."""
    own = (Sampler.tenant_id == tenant_of(owner), *within(owner, Sampler.session_id))
    found = await session.scalar(select(Sampler).where(Sampler.id == sampler_id, *own))
    if found is None:
        raise missing_sampler(sampler_id)
    return found


async def join_sampler(transaction: AsyncSession, owner: Owner, sampler_id: str) -> int:
    """Return the next number, from 1, of a copy of the sampler's client. Raises ``NotFound``, and what bars new samples."""
    counted = (
        update(Sampler)
        .where(Sampler.id == sampler_id, Sampler.tenant_id == tenant_of(owner), *within(owner, Sampler.session_id))
        .values(copies=Sampler.copies + 1)
        .returning(Sampler.copies, Sampler.session_id)
        .execution_options(synchronize_session=False)
    )
    found = (await transaction.execute(counted)).one_or_none()
    if found is None:
        raise missing_sampler(sampler_id)
    await live_session(transaction, owner, found.session_id)
    return int(found.copies)


class SamplerReader:
    """Looks up samplers for new sample requests, many in one query."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._batcher: Batcher[tuple[TenantId, str], SamplerStanding] = Batcher(self._read)

    async def standing(self, owner: Owner, sampler_id: str) -> SamplerStanding:
        """Return the state of the owner's sampler. Raises ``NotFound``."""
        found = await self._batcher.ask((tenant_of(owner), sampler_id))
        if not includes(owner, found.project):
            raise missing_sampler(sampler_id)
        return found

    async def _read(self, asked: Sequence[tuple[TenantId, str]]) -> list[SamplerStanding | WeftError]:
        now = self._clock()
        ids = few_lengths(sorted({sampler_id for _, sampler_id in asked}))
        keys = {"ids": ids, "now": now, **budget_keys(now)}
        async with self._database.read() as session:
            rows = await session.execute(_STANDING, keys)
            found = {(row.tenant_id, row.id): _standing(row) for row in rows}
        return [found.get(key) or missing_sampler(key[1]) for key in asked]


def missing_sampler(sampler_id: str) -> NotFound:
    """Return the error of a sampler that its caller does not have."""
    return NotFound(f"no sampling session {sampler_id[:150]!r}")


def gone_checkpoint() -> NotFound:
    """Return the error of a sampler whose checkpoint is no more to be had."""
    return NotFound("the checkpoint was deleted, has expired or is not shared any more; make a sampler from another")


def _standing(row: Any) -> SamplerStanding:
    obstacle: SessionEnded | NotFound | None = None
    if row.ended_at is not None:
        obstacle = SessionEnded(f"session {row.session_id} has ended ({row.end_reason}); open a new one")
    elif row.checkpoint_id is not None and row.unexpired_checkpoint is None:
        obstacle = gone_checkpoint()
    shared_by = None
    if row.owner is not None and row.owner != row.tenant_id:
        shared_by = TenantId(row.owner), CheckpointPath(row.of_run, Segment(row.segment), row.name)
    return SamplerStanding(
        SamplerId(row.id), row.base_model, obstacle, row.project, row.spent_budgets, row.project_limits, shared_by
    )


async def create_sampler(
    transaction: AsyncSession,
    tenant: TenantId,
    new: NewSampler,
    clock: Clock,
    limits: Limits | None = None,
    actor: Actor | None = None,
) -> SamplerId:
    """Insert the sampler and return its id. Repeating is allowed; other content raises ``SequenceConflict``.

    With ``limits``, the tenant's, raises ``InvalidRequest`` for one more than it may have in the session. With ``actor``, whose
    request it is, the audit log tells of a new one; those that come with training or samples have none.
    """
    sampler_id = sampler_id_for(new.session_id, new.sampling_session_seq_id)
    values = {
        "id": sampler_id,
        "tenant_id": tenant,
        "session_id": new.session_id,
        "sampling_session_seq_id": new.sampling_session_seq_id,
        "base_model": new.base_model,
        "model_path": new.model_path,
        "checkpoint_id": new.checkpoint_id,
        "live_run_id": new.live_run_id,
        "created_at": clock(),
    }
    inserted = insert_unless_present(transaction, Sampler).values(values).returning(Sampler.id)
    if await transaction.scalar(inserted) is not None:
        if limits is not None:
            await _check_samplers(transaction, tenant, new.session_id, limits.session_samplers)
        if actor is not None:
            await _tell(transaction, tenant, sampler_id, new, actor, now=clock())
        return sampler_id
    existing = await get_sampler(transaction, tenant, sampler_id)
    same = (existing.base_model, existing.model_path, existing.live_run_id) == (
        new.base_model,
        new.model_path,
        new.live_run_id,
    )
    if not same:
        raise SequenceConflict(
            f"sampling_session_seq_id {new.sampling_session_seq_id} of this session made another sampler already"
        )
    return sampler_id


async def _tell(
    transaction: AsyncSession, tenant: TenantId, sampler: SamplerId, new: NewSampler, actor: Actor, *, now: datetime
) -> None:
    """Write the new sampler's entry of the audit log."""
    await record(
        transaction,
        actor,
        Action.SAMPLER_CREATE,
        sampler,
        tenant=tenant,
        now=now,
        session_id=new.session_id,
        after={"base_model": new.base_model, "model_path": new.model_path},
    )


async def _check_samplers(transaction: AsyncSession, tenant: TenantId, session_id: str, most: int) -> None:
    """Raise ``InvalidRequest`` if the session has more samplers, with the new one, than its tenant may have in one."""
    await hold_count(transaction, Counted.SAMPLERS, [tenant])
    if (await transaction.scalar(_NUMBER, {"session": session_id}) or 0) > most:
        raise InvalidRequest(
            f"session {session_id} has {most} samplers, which is your limit for one session; open a new session for more"
        )


async def publish_live(
    transaction: AsyncSession, tenant: TenantId, run_id: RunId, version: CheckpointId, clock: Clock
) -> bool:
    """Point every live sampler of the run at ``version``. Return whether any sampler moved.

    The move counts as one publication to each sampler. A sampler that is at ``version`` already stays as it is. No sampler
    moves to a version that has expired or was deleted.
    """
    moved = await transaction.execute(_PUBLISH, {"tenant": tenant, "run": run_id, "version": version, "now": clock()})
    return moved.first() is not None


async def count_samplers(session: AsyncSession, owner: Owner, checkpoints: Collection[str]) -> dict[str, int]:
    """Return how many of the owner's samplers, of sessions that have not ended, sample each of the checkpoints."""
    own = (Sampler.tenant_id == tenant_of(owner), *within(owner, Sampler.session_id))
    rows = await session.execute(
        select(Sampler.checkpoint_id, func.count())
        .join(Session, Session.id == Sampler.session_id)
        .where(Sampler.checkpoint_id.in_(few_lengths(sorted(checkpoints))), *own, Session.ended_at.is_(None))
        .group_by(Sampler.checkpoint_id)
    )
    return {checkpoint or "": samplers for checkpoint, samplers in rows}


async def sampled_runs(session: AsyncSession, owner: Owner, samplers: Collection[str]) -> dict[str, str]:
    """Return the run whose weights each of the owner's samplers samples, without the samplers of a bare base."""
    run = func.coalesce(Sampler.live_run_id, Checkpoint.run_id)
    rows = await session.execute(
        select(Sampler.id, run.label("run"))
        .join(Checkpoint, Checkpoint.id == Sampler.checkpoint_id, isouter=True)
        .where(Sampler.id.in_(few_lengths(sorted(samplers))), Sampler.tenant_id == tenant_of(owner), run.is_not(None))
    )
    return {row.id: row.run for row in rows}


async def lock_unless_at(transaction: AsyncSession, sampler_id: SamplerId, version: CheckpointId) -> bool:
    """Lock the sampler if it is at another version than ``version``. Return whether it is."""
    behind = Sampler.id == sampler_id, Sampler.checkpoint_id.is_distinct_from(version)
    return await transaction.scalar(select(Sampler.id).where(*behind).with_for_update()) is not None


async def point_sampler(transaction: AsyncSession, sampler_id: SamplerId, version: CheckpointId) -> bool:
    """Point one live sampler at ``version``. Return False if the sampler was there already."""
    moved = await transaction.execute(
        update(Sampler)
        .where(Sampler.id == sampler_id, Sampler.checkpoint_id.is_distinct_from(version))
        .values(checkpoint_id=version, publications=Sampler.publications + 1)
        .returning(Sampler.id)
    )
    return moved.first() is not None


async def bound_staleness(
    transaction: AsyncSession, owner: Owner, sampler_id: str, bound: Staleness | None, swap_policy: SwapPolicy | None
) -> Sampler:
    """Set a live sampler's bound and swap policy, or remove them (None).

    Raises ``NotFound``, and ``InvalidRequest`` for a pinned sampler.
    """
    sampler = await get_sampler(transaction, owner, sampler_id)
    if sampler.live_run_id is None:
        raise InvalidRequest("this sampler is pinned to its version: its samples never fall behind")
    sampler.max_version_lag = bound.max_version_lag if bound else None
    sampler.on_stale = bound.on_stale if bound else None
    sampler.swap_policy = swap_policy
    await transaction.flush()
    return sampler


def staleness_of(sampler: Sampler) -> Staleness | None:
    """Return the sampler's bound, or None."""
    if sampler.max_version_lag is None:
        return None
    return Staleness(sampler.max_version_lag, known(OnStale, sampler.on_stale or OnStale.FAIL, OnStale.FAIL))


def swap_policy_of(sampler: Sampler) -> SwapPolicy | None:
    """Return the sampler's own swap policy; None, the service's, for one that only another version knows."""
    return None if sampler.swap_policy is None else known(SwapPolicy, sampler.swap_policy, None)
