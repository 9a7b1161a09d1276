"""Jobs on weights, as tenants see them: asked for, listed, cancelled, and kept a while after their end."""

from dataclasses import dataclass, replace
from datetime import datetime
from uuid import uuid4

import msgspec
from sqlalchemy import Select, and_, case, delete, not_, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound, PayloadTooLarge, SequenceConflict, StorageFull, TooManyOperations, WeftError
from contracts.ids import CheckpointId, TenantId
from contracts.paths import parse_path
from contracts.webhooks import EventKind
from contracts.weight_jobs import ImportRequest, JobKind, JobRequest, JobState, MergeRequest
from store.clock import Clock
from store.deletions import delete_some
from store.inserts import insert_unless_present
from store.tables import DiscardedFolder, WeightJob
from tenants.audit import session_of
from tenants.checkpoints import directory_of
from tenants.imported_checkpoints import import_session
from tenants.limit_use import STORAGE_USE
from tenants.limits import Counted, Limits, hold_count
from tenants.reach import Owner, Reach, includes, tenant_of, within
from tenants.storage import check_storage, room_in_project
from tenants.suspensions import hold_working
from tenants.webhook_events import TenantEvent, record_events

MOST_UNFINISHED = 8
"""Most unfinished jobs of one tenant."""
IMPORTS = "imports"
"""Folder of the archives that wait to be imported: for each a folder by its job's id."""
ARCHIVE = "archive"
"""File of such a folder."""
_FINAL = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)
_FILES_OF = (WeightJob.id, WeightJob.kind, WeightJob.state, WeightJob.checkpoint_id)
"""Columns that tell which files a job has."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be recorded.

    - ``base_model``: base whose workers may take it. ``key``: its request's ``Idempotency-Key``.
    - ``project``: project of an import, None for the default one. A merge is in the project of its checkpoint.
    - ``opened_by``: API key that the session of an import is opened with.
    """

    id: str
    base_model: str
    key: str | None = None
    project: str | None = None
    opened_by: int | None = None


async def add_merge(
    transaction: AsyncSession,
    owner: Owner,
    base_model: str,
    merge: MergeRequest,
    now: datetime,
    *,
    key: str | None = None,
    id: str | None = None,
) -> WeightJob:
    """Record a job, or return the one that an earlier request of this ``key``, or an unfinished one of the same, has made.

    ``id`` is that of a new job.

    Raises ``TooManyOperations``, and ``SequenceConflict`` for a key of another request.
    """
    tenant = tenant_of(owner)
    await hold_count(transaction, Counted.STORAGE, [tenant])
    session = session_of(parse_path(merge.path).run_id)
    job = _new_job(NewJob(id or new_job_id(), base_model, key), tenant, merge, now, session)
    if (earlier := await job_of_key(transaction, owner, key)) is not None:
        if (earlier.kind, earlier.body) != (job.kind, job.body):
            raise _other_request()
        return earlier
    unfinished = await _unfinished(transaction, tenant)
    if key is None and (same := next((one for one in unfinished if one.body == job.body), None)) is not None:
        return same
    _check_count(unfinished)
    return await _add(transaction, job)


async def add_import(
    transaction: AsyncSession, job: NewJob, owner: Owner, asked: ImportRequest, *, defaults: Limits, clock: Clock
) -> WeightJob:
    """Record a job for the archive in ``staged_folder(job.id)``, or return the one that the same request has made before.

    Raises ``TooManyOperations``, ``StorageFull``, ``SequenceConflict`` for a key of another request, and ``Suspended`` for a
    tenant that takes no new work by now: an archive may have taken hours to come.
    """
    tenant = tenant_of(owner)
    await hold_working(transaction, tenant)
    await hold_count(transaction, Counted.STORAGE, [tenant])
    if (earlier := await job_of_key(transaction, owner, job.key)) is not None:
        check_repeated_import(earlier, job, asked)
        return earlier
    room = await check_import(transaction, tenant, job.project, defaults)
    check_archive(asked.archive_bytes, most=asked.archive_bytes, room=room)
    session = await import_session(transaction, tenant, job.id, clock, project=job.project, opened_by=job.opened_by)
    return await _add(transaction, _new_job(job, tenant, asked, clock(), session))


async def job_of_key(session: AsyncSession, owner: Owner, key: str | None) -> WeightJob | None:
    """Return the job whose request had this ``Idempotency-Key``, if it is still kept.

    Raises ``SequenceConflict`` for one of another project of the tenant.
    """
    if key is None:
        return None
    of_key = select(WeightJob).where(WeightJob.tenant_id == tenant_of(owner), WeightJob.idempotency_key == key)
    found = await session.scalar(of_key)
    if found is not None and await session.scalar(_reached(owner).where(WeightJob.id == found.id)) is None:
        raise _other_request()
    return found


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


async def check_import(session: AsyncSession, tenant: TenantId, project: str | None, defaults: Limits) -> int:
    """Return the most bytes of one more archive: the room of the tenant's storage, without what waits to be imported.

    The room of the project's own storage may be less.

    Raises ``TooManyOperations``, and ``StorageFull`` when there is no room for another checkpoint.
    """
    unfinished = await _unfinished(session, tenant)
    _check_count(unfinished)
    staged = [msgspec.msgpack.decode(job.body, type=ImportRequest) for job in unfinished if job.kind == JobKind.IMPORT]
    await check_storage(session, tenant, defaults, coming=1 + len(staged))
    room = (await STORAGE_USE.of(session, tenant, defaults)).room("stored_bytes")
    of_project = await room_in_project(session, tenant, project)
    return min(room - sum(one.archive_bytes for one in staged), room if of_project is None else of_project)


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


def parts_folder(tenant: TenantId) -> str:
    """Return the folder of the tenant's archives whose upload broke off, relative to the data folder."""
    return f"{IMPORTS}/part-{tenant}"


async def _unfinished(session: AsyncSession, tenant: TenantId) -> list[WeightJob]:
    own = select(WeightJob).where(WeightJob.tenant_id == tenant, WeightJob.state.not_in(_FINAL))
    return list(await session.scalars(own))


def _check_count(unfinished: list[WeightJob]) -> None:
    if len(unfinished) >= MOST_UNFINISHED:
        raise TooManyOperations(f"{len(unfinished)} of your jobs are unfinished, the most that may be; wait for one")


def _new_job(new: NewJob, tenant: TenantId, asked: JobRequest, now: datetime, session: str) -> WeightJob:
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
        session_id=session,
    )


async def _add(transaction: AsyncSession, job: WeightJob) -> WeightJob:
    transaction.add(job)
    await transaction.flush()
    return job


def _reached(owner: Owner) -> Select[WeightJob]:
    """Return a query of the owner's jobs."""
    own = select(WeightJob).where(WeightJob.tenant_id == tenant_of(owner))
    if not isinstance(owner, Reach):
        return own
    of_session = or_(*within(owner, WeightJob.session_id))
    return own.where(or_(of_session, WeightJob.session_id.is_(None)) if includes(owner, None) else of_session)


async def get_job(session: AsyncSession, owner: Owner, job_id: str) -> WeightJob:
    """Return the owner's job. Raises ``NotFound``."""
    found = await session.scalar(_reached(owner).where(WeightJob.id == job_id))
    if found is None:
        raise NotFound(f"no job {job_id[:100]!r}")
    return found


async def list_jobs(session: AsyncSession, owner: Owner, *, most: int) -> list[WeightJob]:
    """Return the owner's jobs, newest first."""
    return list(await session.scalars(_reached(owner).order_by(WeightJob.created_at.desc(), WeightJob.id).limit(most)))


async def cancel_job(transaction: AsyncSession, owner: Owner, job_id: str, now: datetime) -> tuple[WeightJob, bool]:
    """End a job that waits, or have the one that runs end soon; a finished job stays as it is.

    One whose worker has gone waits: it may be of a base that nobody serves any more, and nobody would end it.

    Return the job, and whether this has cancelled it. Raises ``NotFound``.
    """
    job = await get_job(transaction, owner, job_id)
    was_cancelled = job.cancelled_at is not None
    is_forsaken = and_(WeightJob.state == JobState.RUNNING, WeightJob.taken_until < now)
    waits = or_(WeightJob.state == JobState.PENDING, is_forsaken)
    # One statement: a job that its worker gives back meanwhile is in one of the two states.
    state = await transaction.scalar(
        update(WeightJob)
        .where(WeightJob.id == job_id, or_(waits, WeightJob.state == JobState.RUNNING))
        .values(
            state=case((waits, JobState.CANCELLED), else_=WeightJob.state),
            finished_at=case((waits, now), else_=WeightJob.finished_at),
            cancelled_at=now,
        )
        .returning(WeightJob.state)
        .execution_options(synchronize_session=False)
    )
    if state == JobState.CANCELLED:
        await tell_end(transaction, TenantId(job.tenant_id), job_id, JobState.CANCELLED, None, now)
    await transaction.refresh(job)
    return job, job.cancelled_at is not None and not was_cancelled


async def drop_jobs(transaction: AsyncSession, tenant: TenantId, now: datetime, *, most: int) -> int:
    """Have the tenant's jobs that run end soon, and delete ``most`` of the others with their files; return how many jobs."""
    runs = and_(WeightJob.state == JobState.RUNNING, WeightJob.taken_until >= now)
    ending = (
        update(WeightJob)
        .where(WeightJob.tenant_id == tenant, runs, WeightJob.cancelled_at.is_(None))
        .values(cancelled_at=now)
        .returning(WeightJob.id)
    )
    some = select(WeightJob.id).where(WeightJob.tenant_id == tenant, not_(runs)).limit(most)
    dropped = delete(WeightJob).where(WeightJob.id.in_(some)).returning(*_FILES_OF)
    told = len((await transaction.execute(ending.execution_options(synchronize_session=False))).all())
    gone = (await transaction.execute(dropped.execution_options(synchronize_session=False))).all()
    # What a done job has made is a checkpoint's.
    folders = [(directory_of(CheckpointId(row.checkpoint_id)), row) for row in gone if row.state != JobState.DONE]
    folders += [(staged_folder(row.id), row) for row in gone if row.kind == JobKind.IMPORT]
    if folders:
        rows = [
            {"directory": folder, "tenant_id": tenant, "checkpoint_id": row.checkpoint_id, "discarded_at": now}
            for folder, row in folders
        ]
        await transaction.execute(insert_unless_present(transaction, DiscardedFolder), rows)
    return told + len(gone)


async def tell_end(
    transaction: AsyncSession,
    tenant: TenantId,
    job_id: str,
    state: JobState,
    outcome: str | WeftError | None,
    now: datetime,
) -> None:
    """Tell the tenant's webhooks that a job has ended."""
    error = outcome if isinstance(outcome, WeftError) else None
    told = {
        "job_id": job_id,
        "state": state,
        "path": None if error else outcome,
        "error_code": error and error.code,
        "error_message": error and error.message,
    }
    await record_events(transaction, [TenantEvent(tenant, EventKind.JOB_FINISHED, job_id, told)], now)


async def forget_jobs(transaction: AsyncSession, *, before: datetime, most: int) -> int:
    """Delete at most ``most`` jobs that ended before ``before``; return how many."""
    old = WeightJob.finished_at < before
    return await delete_some(transaction, WeightJob, old, most=most, first=WeightJob.finished_at)
