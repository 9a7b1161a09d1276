"""Retention of runs, sessions and samplers that have ended.

A run ends when it is unloaded, when its creation fails, or with its session. Its row stays as long as it has a checkpoint.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import case, delete, exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RunId, TenantId
from store.tables import (
    AdapterGate,
    Checkpoint,
    ClientException,
    Operation,
    Placement,
    Run,
    RunState,
    Sampler,
    Session,
    WeightJob,
)
from store.tables.runs import HAS_FORGOTTEN_SNAPSHOT, IS_ENDED, IS_OPEN
from store.walk import Place
from tenants.audit import HOUSEKEEPING, record, session_of
from tenants.audit_actions import Action
from tenants.own_samplers import IS_OWN
from tenants.placements import HAS_PENDING
from tenants.run_points import forget_points
from tenants.usage_hours import keep_projects


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Number of deleted rows, and where the walk goes on: None at its end."""

    rows: int
    next: Place | None


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run whose session has ended: why it has, whether operations of the run are pending, and which trainer leases it."""

    id: RunId
    reason: str
    has_pending: bool
    trainer: str | None


async def end_runs(transaction: AsyncSession, *, ended_before: datetime, most: int) -> list[EndedRun]:
    """Unload at most ``most`` open runs whose session ended before ``ended_before``. The caller ends their operations.

    The leases of runs with operations end with them: their trainers forget what they had begun.
    """
    found = await transaction.execute(
        select(Run.id, Run.trainer_id, Session.end_reason, HAS_PENDING.label("has_pending"))
        .join(Session, Session.id == Run.session_id)
        .where(IS_OPEN, Session.ended_at < ended_before)
        .order_by(Run.id)
        .limit(most)
        .with_for_update(skip_locked=True, of=Run)
    )
    ended = [EndedRun(RunId(row.id), row.end_reason or "ended", row.has_pending, row.trainer_id) for row in found]
    ids = [one.id for one in ended]
    if ids:
        fenced = case(
            (Run.id.in_([one.id for one in ended if one.has_pending]), Run.lease_token + 1), else_=Run.lease_token
        )
        await transaction.execute(
            update(Run)
            .where(Run.id.in_(ids))
            .values(state=RunState.UNLOADED, lease_token=fenced)
            .execution_options(synchronize_session=False)
        )
        await transaction.execute(delete(Placement).where(Placement.run_id.in_(ids)))
    return ended


async def drop_snapshots(transaction: AsyncSession, *, most: int) -> list[str]:
    """Forget the snapshots of at most ``most`` ended runs. Return the folders, to be removed after the commit."""
    found = await transaction.execute(
        select(Run.id, Run.snapshot_dir)
        .where(HAS_FORGOTTEN_SNAPSHOT)
        .order_by(Run.id)
        .limit(most)
        .with_for_update(skip_locked=True)
    )
    rows = found.all()
    if rows:
        await transaction.execute(
            update(Run)
            .where(Run.id.in_([row.id for row in rows]))
            .values(snapshot_dir=None, snapshot_bytes=0)
            .execution_options(synchronize_session=False)
        )
    return [row.snapshot_dir for row in rows]


async def forget_runs(
    transaction: AsyncSession, *, before: datetime, now: datetime, after: Place | None, most: int
) -> Forgotten:
    """Delete ended runs without a request since ``before`` that have neither checkpoints nor operations.

    Their gates, points and metrics go with them, and so do the samplers of OpenAI clients that followed them.
    Looks at the next ``most`` of them.
    """
    is_needed = (
        exists().where(Checkpoint.run_id == Run.id)
        | exists().where(Operation.lane == Run.id)
        | exists().where(Sampler.live_run_id == Run.id, ~IS_OWN)
    )
    query = (
        select(Run.id, Run.last_request_at, Run.snapshot_dir, is_needed.label("is_needed"))
        .where(IS_ENDED, Run.last_request_at < before)
        .order_by(Run.last_request_at, Run.id)
        .limit(most)
    )
    if after is not None:
        query = query.where(after.precedes(Run.last_request_at, Run.id))
    seen = (await transaction.execute(query)).all()
    needless = [row.id for row in seen if not row.is_needed and row.snapshot_dir is None]
    if needless:
        if await forget_points(transaction, needless, most=most) == most:
            # There may be more points: the same runs come once more.
            return Forgotten(most, after or Place(datetime.min.replace(tzinfo=UTC), ""))
        await transaction.execute(delete(AdapterGate).where(AdapterGate.run_id.in_(needless)))
        await transaction.execute(delete(Placement).where(Placement.run_id.in_(needless)))
        await transaction.execute(delete(Sampler).where(Sampler.live_run_id.in_(needless), IS_OWN))
        gone = delete(Run).where(Run.id.in_(needless)).returning(Run.id, Run.tenant_id, Run.last_request_at)
        for row in await transaction.execute(gone.execution_options(synchronize_session=False)):
            await record(
                transaction,
                HOUSEKEEPING,
                Action.RUN_DELETE,
                row.id,
                tenant=TenantId(row.tenant_id),
                now=now,
                session_id=session_of(row.id),
                before={"last_request_at": row.last_request_at},
            )
    return Forgotten(len(needless), Place(seen[-1].last_request_at, seen[-1].id) if len(seen) == most else None)


async def forget_sessions(transaction: AsyncSession, *, before: datetime, after: Place | None, most: int) -> Forgotten:
    """Delete sessions that ended before ``before``, and their samplers; a session with runs, or operations, stays.

    Looks at the next ``most`` sessions, and at no more than ``most`` samplers: a session with more is begun.
    """
    ended = (
        select(Session.id, Session.ended_at)
        .where(Session.ended_at < before)
        .order_by(Session.ended_at, Session.id)
        .limit(most)
    )
    if after is not None:
        ended = ended.where(after.precedes(Session.ended_at, Session.id))
    seen = (await transaction.execute(ended)).all()
    if not seen:
        return Forgotten(0, None)
    ids = [row.id for row in seen]
    unused = (
        select(Sampler.id).where(Sampler.session_id.in_(ids), ~exists().where(Operation.lane == Sampler.id)).limit(most)
    )
    samplers = (
        await transaction.execute(
            delete(Sampler)
            .where(Sampler.id.in_(unused))
            .returning(Sampler.id)
            .execution_options(synchronize_session=False)
        )
    ).all()
    if len(samplers) == most:
        # There may be more samplers: the same sessions come once more.
        return Forgotten(len(samplers), after or Place(datetime.min.replace(tzinfo=UTC), ""))
    sessions = await _forget_needless(transaction, ids, before)
    last = seen[-1]
    return Forgotten(len(samplers) + sessions, Place(last.ended_at, last.id) if len(seen) == most else None)


async def _forget_needless(transaction: AsyncSession, ids: list[str], before: datetime) -> int:
    """Delete those of the sessions that nothing names, with the exceptions of their scripts; return how many sessions."""
    needless = select(Session.id).where(
        Session.id.in_(ids),
        # Again open: a session that serves clients without one is reopened by its name.
        Session.ended_at < before,
        ~exists().where(Run.session_id == Session.id),
        ~exists().where(Sampler.session_id == Session.id),
        ~exists().where(WeightJob.session_id == Session.id),
    )
    told = delete(ClientException).where(ClientException.session_id.in_(needless))
    await transaction.execute(told.execution_options(synchronize_session=False))
    going = needless.where(~exists().where(ClientException.session_id == Session.id))
    # Of those alone: usage of a session that stays goes where the session does.
    await keep_projects(transaction, going)
    gone = delete(Session).where(Session.id.in_(going)).returning(Session.id)
    return len((await transaction.execute(gone.execution_options(synchronize_session=False))).all())
