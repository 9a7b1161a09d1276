"""Jobs on weights in workers' hands: each is taken by one worker at a time, under a lease."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import uuid4

import msgspec
from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from contracts.errors import WeftError
from contracts.ids import CheckpointId, SessionId, TenantId
from contracts.weight_jobs import ImportRequest, JobKind, JobRequest, JobState, MergeRequest
from store.batcher import few_lengths
from store.tables import Tenant, WeightJob
from tenants.weight_jobs import tell_end

LEASE = timedelta(seconds=30)
"""Time after which a job is another worker's whose own has not renewed it."""
_REQUESTS: Mapping[str, type[JobRequest]] = {JobKind.MERGE: MergeRequest, JobKind.IMPORT: ImportRequest}


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job in a worker's hands. ``token`` names the attempt: a write under an older one is refused.

    ``checkpoint`` is new with each attempt; ``abandoned`` is that of the attempt before, of which files may be left.
    ``session``: see ``WeightJob.session_id``.
    """

    id: str
    tenant: TenantId
    base_model: str
    asked: JobRequest
    checkpoint: CheckpointId
    abandoned: CheckpointId
    attempts: int
    token: str
    session: SessionId | None = None


async def take_job(
    transaction: AsyncSession, bases: list[str], now: datetime, *, but: Collection[str] = ()
) -> TakenJob | None:
    """Take the job whose tenant was served longest ago, among those that wait or whose worker has died; None without any.

    The jobs ``but`` are left, and not taken. Jobs of a kind that only another version knows are left to its workers.
    """
    other = aliased(WeightJob)
    served = select(func.max(other.started_at)).where(other.tenant_id == WeightJob.tenant_id).scalar_subquery()
    free = or_(
        WeightJob.state == JobState.PENDING,
        and_(WeightJob.state == JobState.RUNNING, WeightJob.taken_until < now),
    )
    found = await transaction.scalar(
        select(WeightJob)
        .join(Tenant, Tenant.id == WeightJob.tenant_id)
        .where(free, WeightJob.kind.in_(_REQUESTS), WeightJob.base_model.in_(bases), Tenant.suspended_at.is_(None))
        .where(WeightJob.id.not_in(few_lengths(list(but))))
        .order_by(func.coalesce(served, WeightJob.created_at), WeightJob.created_at, WeightJob.id)
        .limit(1)
        .with_for_update(of=WeightJob, skip_locked=True)
    )
    if found is None:
        return None
    token, abandoned = uuid4().hex, CheckpointId(found.checkpoint_id)
    found.checkpoint_id = uuid4().hex
    found.state, found.taken_by, found.taken_until = JobState.RUNNING, token, now + LEASE
    found.started_at, found.attempts = now, found.attempts + 1
    await transaction.flush()
    return TakenJob(
        id=found.id,
        tenant=TenantId(found.tenant_id),
        base_model=found.base_model,
        asked=msgspec.msgpack.decode(found.body, type=_REQUESTS[found.kind]),
        checkpoint=CheckpointId(found.checkpoint_id),
        abandoned=abandoned,
        attempts=found.attempts,
        token=token,
        session=None if found.session_id is None else SessionId(found.session_id),
    )


def _is_held(job: TakenJob) -> ColumnElement[bool]:
    return and_(WeightJob.id == job.id, WeightJob.taken_by == job.token, WeightJob.state == JobState.RUNNING)


async def renew_job(transaction: AsyncSession, job: TakenJob, *, done: int, total: int, now: datetime) -> bool:
    """Renew the lease and tell the progress in bytes. Return False if the job is to end: cancelled, or another's by now."""
    row = await transaction.execute(
        update(WeightJob)
        .where(_is_held(job), WeightJob.cancelled_at.is_(None))
        .values(taken_until=now + LEASE, done_bytes=done, total_bytes=total)
        .returning(WeightJob.id)
        .execution_options(synchronize_session=False)
    )
    return row.one_or_none() is not None


async def finish_job(
    transaction: AsyncSession,
    job: TakenJob,
    outcome: str | WeftError,
    *,
    state: JobState,
    now: datetime,
    total: int = 0,
) -> bool:
    """Record the job's end, a path or an error. Return False, with nothing written, if another worker has it.

    ``total``: bytes that a job which is done has written.
    """
    error = outcome if isinstance(outcome, WeftError) else None
    row = await transaction.execute(
        update(WeightJob)
        .where(_is_held(job))
        .values(
            state=state,
            finished_at=now,
            taken_by=None,
            taken_until=None,
            result_path=None if error else outcome,
            error_code=None if error is None else error.code,
            error_message=None if error is None else error.message,
            **({} if error else {"done_bytes": total, "total_bytes": total}),
        )
        .returning(WeightJob.id)
        .execution_options(synchronize_session=False)
    )
    if row.one_or_none() is None:
        return False
    await tell_end(transaction, job.tenant, job.id, state, outcome, now)
    return True


async def recorded_path(session: AsyncSession, job: TakenJob) -> str | None:
    """Return the path of what this very attempt has made, None while it is not recorded."""
    own = select(WeightJob.result_path).where(WeightJob.id == job.id, WeightJob.checkpoint_id == job.checkpoint)
    found: str | None = await session.scalar(own)
    return found


async def give_back(transaction: AsyncSession, job: TakenJob, *, counts: bool = False) -> None:
    """Let another worker take the job at once. Without ``counts`` what was begun is no attempt."""
    await transaction.execute(
        update(WeightJob)
        .where(_is_held(job))
        .values(state=JobState.PENDING, taken_by=None, taken_until=None)
        .values(attempts=WeightJob.attempts - (0 if counts else 1))
        .execution_options(synchronize_session=False)
    )


async def free_all(transaction: AsyncSession) -> None:
    """End every lease, when no worker can live: at the start of a service of one process."""
    await transaction.execute(
        update(WeightJob).where(WeightJob.state == JobState.RUNNING).values(state=JobState.PENDING, taken_by=None)
    )
