"""Jobs on weights: asked for by tenants, taken by one worker at a time under a lease, and kept a while after their end."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from uuid import uuid4

import msgspec
from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from contracts.errors import NotFound, PayloadTooLarge, SequenceConflict, StorageFull, TooManyOperations, WeftError
from contracts.ids import CheckpointId, TenantId
from contracts.weight_jobs import ImportRequest, JobKind, JobRequest, JobState, MergeRequest
from store.tables import Tenant, WeightJob
from tenants.limit_use import STORAGE_USE
from tenants.limits import Counted, Limits, hold_count
from tenants.storage import check_storage

MOST_UNFINISHED = 8
"""Most unfinished jobs of one tenant."""
LEASE = timedelta(seconds=30)
"""Time after which a job is another worker's whose own has not renewed it."""
IMPORTS = "imports"
"""Folder of the archives that wait to be imported: for each a folder by its job's id."""
ARCHIVE = "archive"
"""File of such a folder."""
_REQUESTS: Mapping[str, type[JobRequest]] = {JobKind.MERGE: MergeRequest, JobKind.IMPORT: ImportRequest}
_FINAL = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be recorded: its id, the base model whose workers may take it, and its request's ``Idempotency-Key``."""

    id: str
    base_model: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job in a worker's hands. ``token`` names the attempt: a write under an older one is refused.

    ``checkpoint`` is new with each attempt; ``abandoned`` is that of the attempt before, of which files may be left.
    """

    id: str
    tenant: TenantId
    base_model: str
    asked: JobRequest
    checkpoint: CheckpointId
    abandoned: CheckpointId
    attempts: int
    token: str


async def add_merge(
    transaction: AsyncSession,
    tenant: TenantId,
    base_model: str,
    merge: MergeRequest,
    now: datetime,
    *,
    key: str | None = None,
) -> WeightJob:
    """Record a job, or return the one that an earlier request of this ``key``, or an unfinished one of the same, has made.

    Raises ``TooManyOperations``, and ``SequenceConflict`` for a key of another request.
    """
    await hold_count(transaction, Counted.STORAGE, [tenant])
    job = _new_job(NewJob(new_job_id(), base_model, key), tenant, merge, now)
    if (earlier := await job_of_key(transaction, tenant, key)) is not None:
        if (earlier.kind, earlier.body) != (job.kind, job.body):
            raise _other_request()
        return earlier
    unfinished = await _unfinished(transaction, tenant)
    if key is None and (same := next((one for one in unfinished if one.body == job.body), None)) is not None:
        return same
    _check_count(unfinished)
    return await _add(transaction, job)


async def add_import(
    transaction: AsyncSession, job: NewJob, tenant: TenantId, asked: ImportRequest, *, defaults: Limits, now: datetime
) -> WeightJob:
    """Record a job for the archive in ``staged_folder(job.id)``, or return the one that the same request has made before.

    Raises ``TooManyOperations``, ``StorageFull``, and ``SequenceConflict`` for a key of another request.
    """
    await hold_count(transaction, Counted.STORAGE, [tenant])
    if (earlier := await job_of_key(transaction, tenant, job.key)) is not None:
        check_repeated_import(earlier, job, asked)
        return earlier
    room = await check_import(transaction, tenant, defaults)
    check_archive(asked.archive_bytes, most=asked.archive_bytes, room=room)
    return await _add(transaction, _new_job(job, tenant, asked, now))


async def job_of_key(session: AsyncSession, tenant: TenantId, key: str | None) -> WeightJob | None:
    """Return the tenant's job whose request had this ``Idempotency-Key``, if it is still kept."""
    if key is None:
        return None
    return await session.scalar(
        select(WeightJob).where(WeightJob.tenant_id == tenant, WeightJob.idempotency_key == key)
    )


def check_repeated_import(earlier: WeightJob, job: NewJob, asked: ImportRequest) -> None:
    """Raise ``SequenceConflict`` unless ``earlier`` does what ``job`` is to do. ``archive_bytes`` of 0 is not known yet."""
    if earlier.kind != JobKind.IMPORT or earlier.base_model != job.base_model:
        raise _other_request()
    recorded = msgspec.msgpack.decode(earlier.body, type=ImportRequest)
    if recorded != replace(asked, archive_bytes=asked.archive_bytes or recorded.archive_bytes):
        raise _other_request()


def _other_request() -> SequenceConflict:
    return SequenceConflict(
        "Idempotency-Key: another request of yours has made a job under this key; take a new key for each new request"
    )


async def check_import(session: AsyncSession, tenant: TenantId, defaults: Limits) -> int:
    """Return the most bytes of one more archive: the room of the tenant's storage, without what waits to be imported.

    Raises ``TooManyOperations``, and ``StorageFull`` when there is no room for another checkpoint.
    """
    unfinished = await _unfinished(session, tenant)
    _check_count(unfinished)
    staged = [msgspec.msgpack.decode(job.body, type=ImportRequest) for job in unfinished if job.kind == JobKind.IMPORT]
    await check_storage(session, tenant, defaults, coming=1 + len(staged))
    room = (await STORAGE_USE.of(session, tenant, defaults)).room("stored_bytes")
    return room - sum(one.archive_bytes for one in staged)


def check_archive(size: int, *, most: int, room: int) -> None:
    """Raise ``PayloadTooLarge`` for an archive of more than ``most`` bytes, ``StorageFull`` for more than ``room``."""
    if size > most:
        raise PayloadTooLarge(f"the archive is over the limit of {most} bytes; send the adapter's two files alone")
    if size > room:
        raise StorageFull(
            f"your storage has room for an archive of {max(room, 0)} bytes, archives that wait counted; delete some checkpoints"
        )


def new_job_id() -> str:
    """Return a fresh id of a job."""
    return uuid4().hex


def staged_folder(job_id: str) -> str:
    """Return the folder of an import's archive, relative to the data folder."""
    return f"{IMPORTS}/{job_id}"


async def _unfinished(session: AsyncSession, tenant: TenantId) -> list[WeightJob]:
    own = select(WeightJob).where(WeightJob.tenant_id == tenant, WeightJob.state.not_in(_FINAL))
    return list(await session.scalars(own))


def _check_count(unfinished: list[WeightJob]) -> None:
    if len(unfinished) >= MOST_UNFINISHED:
        raise TooManyOperations(f"{len(unfinished)} of your jobs are unfinished, the most that may be; wait for one")


def _new_job(new: NewJob, tenant: TenantId, asked: JobRequest, now: datetime) -> WeightJob:
    return WeightJob(
        id=new.id,
        tenant_id=tenant,
        kind=JobKind.IMPORT if isinstance(asked, ImportRequest) else JobKind.MERGE,
        base_model=new.base_model,
        state=JobState.PENDING,
        body=msgspec.msgpack.encode(asked),
        checkpoint_id=uuid4().hex,
        done_bytes=0,
        total_bytes=0,
        attempts=0,
        created_at=now,
        idempotency_key=new.key,
    )


async def _add(transaction: AsyncSession, job: WeightJob) -> WeightJob:
    transaction.add(job)
    await transaction.flush()
    return job


async def get_job(session: AsyncSession, tenant: TenantId, job_id: str) -> WeightJob:
    """Return the tenant's job. Raises ``NotFound``."""
    found = await session.scalar(select(WeightJob).where(WeightJob.id == job_id, WeightJob.tenant_id == tenant))
    if found is None:
        raise NotFound(f"no job {job_id[:100]!r}")
    return found


async def list_jobs(session: AsyncSession, tenant: TenantId, *, most: int) -> list[WeightJob]:
    """Return the tenant's jobs, newest first."""
    own = select(WeightJob).where(WeightJob.tenant_id == tenant)
    return list(await session.scalars(own.order_by(WeightJob.created_at.desc(), WeightJob.id).limit(most)))


async def cancel_job(transaction: AsyncSession, tenant: TenantId, job_id: str, now: datetime) -> WeightJob:
    """End a job that waits, or have the one that runs end soon. A finished job stays as it is. Raises ``NotFound``."""
    job = await get_job(transaction, tenant, job_id)
    await transaction.execute(
        update(WeightJob)
        .where(WeightJob.id == job_id, WeightJob.state == JobState.PENDING)
        .values(state=JobState.CANCELLED, cancelled_at=now, finished_at=now)
    )
    await transaction.execute(
        update(WeightJob).where(WeightJob.id == job_id, WeightJob.state == JobState.RUNNING).values(cancelled_at=now)
    )
    await transaction.refresh(job)
    return job


async def take_job(transaction: AsyncSession, bases: list[str], now: datetime) -> TakenJob | None:
    """Take the job whose tenant was served longest ago, among those that wait or whose worker has died; None without any."""
    other = aliased(WeightJob)
    served = select(func.max(other.started_at)).where(other.tenant_id == WeightJob.tenant_id).scalar_subquery()
    free = or_(
        WeightJob.state == JobState.PENDING,
        and_(WeightJob.state == JobState.RUNNING, WeightJob.taken_until < now),
    )
    found = await transaction.scalar(
        select(WeightJob)
        .join(Tenant, Tenant.id == WeightJob.tenant_id)
        .where(free, WeightJob.base_model.in_(bases), Tenant.suspended_at.is_(None))
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
    return row.one_or_none() is not None


async def give_back(transaction: AsyncSession, job: TakenJob) -> None:
    """Let another worker take the job at once: this one ends in order, which counts as no attempt."""
    await transaction.execute(
        update(WeightJob)
        .where(_is_held(job))
        .values(state=JobState.PENDING, taken_by=None, taken_until=None, attempts=WeightJob.attempts - 1)
        .execution_options(synchronize_session=False)
    )


async def free_all(transaction: AsyncSession) -> None:
    """End every lease, when no worker can live: at the start of a service of one process."""
    await transaction.execute(
        update(WeightJob).where(WeightJob.state == JobState.RUNNING).values(state=JobState.PENDING, taken_by=None)
    )


async def forget_jobs(transaction: AsyncSession, *, before: datetime, most: int) -> int:
    """Delete at most ``most`` jobs that ended before ``before``; return how many."""
    old = select(WeightJob.id).where(WeightJob.finished_at < before).order_by(WeightJob.finished_at).limit(most)
    gone = await transaction.execute(
        delete(WeightJob)
        .where(WeightJob.id.in_(old))
        .returning(WeightJob.id)
        .execution_options(synchronize_session=False)
    )
    return len(gone.all())
