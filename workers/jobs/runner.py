"""Runs jobs on weights, one at a time in a process: takes a job, works on a thread, and tells its progress meanwhile.

A job whose worker dies, or makes no progress, is free when its lease ends, and begins again. Each attempt writes a folder of
its own, which only the holder of the lease records. Work that is done is not done again because the database cannot take its
record: the worker keeps the job and tries again, while it goes on with other jobs.
"""

import asyncio
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Cancelled, EngineFailure, InvalidRequest, PoisonOperation, Unavailable, WeftError
from contracts.paths import CheckpointPath, Segment, parse_path
from contracts.weight_jobs import ImportRequest, JobState, MergeRequest
from engine.model.adapter_import import ImportBounds
from engine.model.atomic_folder import write_atomically
from engine.model.base import BaseModel
from engine.model.merged_model import MergeSource
from ledger.runtime import Runtime
from ledger.wakeups import JOBS
from store.repeat import repeat, wait_for_any
from tenants.audit import Actor, Door, session_of
from tenants.audit import record as record_entry
from tenants.audit_actions import Action
from tenants.checkpoints import NewCheckpoint, directory_of, find_checkpoint, is_path_taken
from tenants.imported_checkpoints import ImportedCheckpoint, record_import
from tenants.limit_use import STORAGE_USE
from tenants.limits import Counted, Limits, hold_count, limits_of
from tenants.project_limits import RANK, smaller, use_in_session
from tenants.storage import store_checkpoint
from tenants.taken_jobs import (
    LEASE,
    TakenJob,
    finish_job,
    free_all,
    give_back,
    recorded_path,
    renew_job,
    take_job,
)
from tenants.weight_jobs import staged_folder
from workers.jobs.imports import write_import

log = logging.getLogger(__name__)

T = TypeVar("T")

SWEEP_SECONDS = 5.0
_RETRY_SECONDS = 1.0
"""Time between two tries to record how a job ended."""
_RENEW_SECONDS = LEASE.total_seconds() / 6


class AttemptEnds(Exception):
    """The work of an attempt ends before it is done."""


@dataclass
class _Attempt:
    """Link between the thread that works and the loop that renews the lease."""

    job: TakenJob
    done: int = 0
    total: int = 0
    moved: float = field(default_factory=monotonic)
    """Time of the last progress."""
    ends: threading.Event = field(default_factory=threading.Event)
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the work is done and the database has not taken its record."""
    stalls: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the work is given up, since it makes no progress. Its thread may be held for ever."""

    def progress(self, done: int, total: int) -> None:
        """Take note of the progress; called by the thread. Raises ``AttemptEnds`` when the attempt is to end."""
        self.done, self.total, self.moved = done, total, monotonic()
        if self.ends.is_set():
            raise AttemptEnds


class JobRunner:
    """Worker of the jobs for ``bases``, in a cluster called by Celery tasks, in ``weft serve`` by ``run``."""

    def __init__(self, runtime: Runtime, bases: Mapping[str, BaseModel]) -> None:
        """Look at ``bases``, which their trainers load, by name at each look for jobs: none is taken before its base is there."""
        self._runtime = runtime
        self._bases = bases
        self._defaults = Limits.of(runtime.settings)
        self._lock = asyncio.Lock()
        self._current: _Attempt | None = None
        self._unrecorded: set[asyncio.Task[None]] = set()
        """Attempts whose work is done, and whose record the database has not taken yet."""
        self._stalled: set[asyncio.Task[None]] = set()
        """Attempts that are given up; nobody waits for them."""
        self._recording = asyncio.Lock()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Run jobs as they come until ``stop``."""
        with self._runtime.wakeups.listen(JOBS) as wake:
            failed = "jobs on weights could not be run"
            await repeat(self.run_all, seconds=SWEEP_SECONDS, stopping=self._stopping, wake=wake, failed=failed)
        await self.finished()

    def stop(self) -> None:
        """Give the job in hand back, at its next step, and take no more."""
        self._stopping.set()
        if self._current is not None:
            self._current.ends.set()

    async def finished(self) -> None:
        """Wait until no job is in hand, after ``stop``."""
        async with self._lock:
            pass
        if self._unrecorded:
            await asyncio.wait(self._unrecorded)

    async def free_all(self) -> None:
        """End the leases of workers that died; call it only while no other process works."""
        async with self._runtime.database.write() as transaction:
            await free_all(transaction)

    @property
    def is_busy(self) -> bool:
        """True while the process has a job in hand."""
        return self._lock.locked()

    async def run_all(self) -> None:
        """Run jobs until none is left. Return at once if the process has one in hand. Raises ``Unavailable``."""
        if self.is_busy:
            return
        async with self._lock:
            while not self._stopping.is_set() and await self._run_next():
                pass

    async def _run_next(self) -> bool:
        async with self._runtime.database.write() as transaction:
            job = await take_job(transaction, list(self._bases), self._runtime.clock())
        if job is None:
            return False
        self._current = attempt = _Attempt(job)
        working = asyncio.create_task(self._hold(attempt), name=f"job {job.id}")
        events = [asyncio.create_task(event.wait()) for event in (attempt.waits, attempt.stalls)]
        is_left = False
        try:
            await asyncio.wait([working, *events], return_when=asyncio.FIRST_COMPLETED)
            if is_left := not working.done():
                (self._stalled if attempt.stalls.is_set() else self._unrecorded).add(working)
                working.add_done_callback(self._recorded)
                return True
        finally:
            self._current = None
            for event in events:
                event.cancel()
            if not is_left:
                working.cancel()
        await working
        return True

    async def _hold(self, attempt: _Attempt) -> None:
        """Work on the job, and keep its lease meanwhile."""
        ended = asyncio.Event()
        renewing = asyncio.create_task(self._renew(attempt, ended), name=f"lease of job {attempt.job.id}")
        try:
            await self._attempt(attempt)
        finally:
            ended.set()
            # Not cancelled: a renewal that is cut off may hold the row for a moment longer, and whoever takes jobs skips it.
            await renewing

    def _recorded(self, working: asyncio.Task[None]) -> None:
        self._unrecorded.discard(working)
        self._stalled.discard(working)
        if not working.cancelled() and (failure := working.exception()) is not None:
            log.error(
                "%s was not recorded; it begins again once its lease has ended", working.get_name(), exc_info=failure
            )

    async def _renew(self, attempt: _Attempt, ended: asyncio.Event) -> None:
        """Keep the lease while the attempt makes progress, and while its record waits for the database."""
        limit = self._runtime.settings.stall_limit.total_seconds()

        async def renew() -> None:
            if not attempt.waits.is_set() and (still := monotonic() - attempt.moved) > limit:
                log.error("job=%s has made no progress for %.0f s; its lease is given up", attempt.job.id, still)
                attempt.ends.set()
                attempt.stalls.set()
                ended.set()
                return
            now, job = self._runtime.clock(), attempt.job
            async with self._runtime.database.write() as transaction:
                if not await renew_job(transaction, job, done=attempt.done, total=attempt.total, now=now):
                    attempt.ends.set()

        await repeat(renew, seconds=_RENEW_SECONDS, stopping=ended, failed="a job's lease could not be renewed")

    async def _attempt(self, attempt: _Attempt) -> None:
        job = attempt.job
        log.info("job=%s attempt=%d begins", job.id, job.attempts)
        try:
            if job.attempts > self._runtime.settings.max_attempts:
                raise PoisonOperation(
                    f"{job.attempts - 1} attempts of this job ended with their process or made no progress; it is not tried "
                    "again"
                )
            match job.asked:
                case MergeRequest() as merge:
                    path = await self._merge(attempt, merge)
                case ImportRequest() as asked:
                    path = await self._import(attempt, asked)
        except AttemptEnds:
            await self._interrupted(attempt)
        except Unavailable:
            if not attempt.waits.is_set():
                # The work could not begin, for which the job is not to blame.
                await self._written(attempt, partial(give_back, job=job))
            raise
        except WeftError as error:
            await self._end(attempt, error, JobState.FAILED)
        except Exception:
            # A full disk, no memory, a damaged file of the base or of the checkpoint. A job's edge: it would be told as one
            # that ended its processes.
            log.exception("job=%s failed", job.id)
            message = f"weft failed to run this job; the service's log has the cause (job {job.id})"
            await self._end(attempt, EngineFailure(message), JobState.FAILED)
        else:
            log.info("job=%s done path=%s", job.id, path)
            await self._drop_staged(job)

    async def _interrupted(self, attempt: _Attempt) -> None:
        if attempt.stalls.is_set():
            # Its thread goes on after all. Whoever takes the job, once the lease has ended, begins again.
            return
        if self._stopping.is_set():
            await self._written(attempt, partial(give_back, job=attempt.job))
            return
        # Cancelled; or another worker's, and then nothing is written.
        await self._end(attempt, Cancelled("the job was cancelled by its tenant"), JobState.CANCELLED)

    async def _end(self, attempt: _Attempt, error: WeftError, state: JobState) -> None:
        async def write(transaction: AsyncSession) -> bool:
            return await finish_job(transaction, attempt.job, error, state=state, now=self._runtime.clock())

        if await self._written(attempt, write):
            await self._drop_staged(attempt.job)

    async def _written(self, attempt: _Attempt, write: Callable[[AsyncSession], Awaitable[T]]) -> T:
        """Return what ``write`` does in a transaction, which is tried again until the database takes it.

        Other jobs go on meanwhile. Raises ``Unavailable`` once this worker stops.
        """
        database = self._runtime.database
        try:
            async with database.write() as transaction:
                return await write(transaction)
        except Unavailable as failure:
            if self._stopping.is_set():
                raise
            log.warning("job=%s is done but for its record, which is tried again: %s", attempt.job.id, failure.message)
        attempt.waits.set()
        while True:
            await wait_for_any([self._stopping], _RETRY_SECONDS)
            try:
                # One at a time: a lock that stays must not take more of the database's connections.
                async with self._recording, database.write() as transaction:
                    return await write(transaction)
            except Unavailable:
                if self._stopping.is_set():
                    raise

    async def _drop_staged(self, job: TakenJob) -> None:
        if isinstance(job.asked, ImportRequest):
            await asyncio.to_thread(self._runtime.data_folder.remove, staged_folder(job.id))

    # --- merges ----------------------------------------------------------------------------------------------------

    async def _merge(self, attempt: _Attempt, asked: MergeRequest) -> str:
        job = attempt.job
        path = parse_path(asked.path)
        target = CheckpointPath(path.run_id, Segment.EXTERNAL_WEIGHTS, asked.name)
        async with self._runtime.database.read() as session:
            source, run = await find_checkpoint(session, job.tenant, path, self._runtime.clock)
            if await is_path_taken(session, job.tenant, target):
                raise InvalidRequest(
                    f"name: the run has a checkpoint {target.checkpoint_id} already; choose another name"
                )
            room = (await STORAGE_USE.of(session, job.tenant, self._defaults)).room("stored_bytes")
        folder = self._runtime.data_folder
        base, adapter = self._bases[run.base_model].facts.path, folder.path(source.directory)
        directory = folder.path(directory_of(job.checkpoint))
        await asyncio.to_thread(_remove, folder.path(directory_of(job.abandoned)))
        merging = _Merge(base, adapter, directory, asked.dtype)
        size = await asyncio.to_thread(_write, merging, attempt, room)
        new = NewCheckpoint(
            id=job.checkpoint,
            run_id=run.id,  # type: ignore[arg-type]
            segment=Segment.EXTERNAL_WEIGHTS,
            name=asked.name,
            size_bytes=size,
            ttl_seconds=asked.ttl_seconds,
            listed=True,
            user_metadata=None,
        )

        async def record(transaction: AsyncSession) -> CheckpointPath:
            await store_checkpoint(transaction, job.tenant, new, self._runtime.clock, self._defaults)
            return target

        return await self._record(attempt, record)

    # --- imports ---------------------------------------------------------------------------------------------------

    async def _import(self, attempt: _Attempt, asked: ImportRequest) -> str:
        job, settings, folder = attempt.job, self._runtime.settings, self._runtime.data_folder
        bounds = ImportBounds(settings.max_import_bytes, await self._largest_rank(job))
        staged, directory = folder.path(staged_folder(job.id)), folder.path(directory_of(job.checkpoint))
        await asyncio.to_thread(_remove, folder.path(directory_of(job.abandoned)))
        base = self._bases[job.base_model]
        size, lora = await asyncio.to_thread(write_import, staged, directory, base, bounds, attempt.progress)
        new = ImportedCheckpoint(
            job.checkpoint, job.base_model, lora, asked.segment, asked.name, size, asked.ttl_seconds
        )

        async def record(transaction: AsyncSession) -> CheckpointPath:
            clock = self._runtime.clock
            return await record_import(transaction, job.tenant, new, clock, self._defaults, session=job.session)

        return await self._record(attempt, record)

    async def _largest_rank(self, job: TakenJob) -> int:
        """Return the largest rank that the service, the job's tenant and its project allow."""
        async with self._runtime.database.read() as session:
            tenants = (await limits_of(session, job.tenant, self._defaults)).max_rank
            own = None if job.session is None else await use_in_session(session, job.tenant, job.session, ())
        return smaller(smaller(self._runtime.settings.max_rank, tenants), None if own is None else own.limits.get(RANK))

    async def _record(self, attempt: _Attempt, record: Callable[[AsyncSession], Awaitable[CheckpointPath]]) -> str:
        """Record the job's end and, by ``record``, what it made, both or neither; return its path."""
        clock, job, total = self._runtime.clock, attempt.job, attempt.total

        async def write(transaction: AsyncSession) -> str:
            await hold_count(transaction, Counted.STORAGE, [job.tenant])
            if (recorded := await recorded_path(transaction, job)) is not None:
                # By an earlier try, whose COMMIT was not answered.
                return recorded
            if attempt.ends.is_set() and not self._stopping.is_set():
                raise AttemptEnds
            target = str(await record(transaction))
            if not await finish_job(transaction, job, target, state=JobState.DONE, now=clock(), total=total):
                raise AttemptEnds
            # The job's own entry tells whose request it was.
            await record_entry(
                transaction,
                Actor(Door.SERVICE, "jobs"),
                Action.CHECKPOINT_CREATE,
                target,
                tenant=job.tenant,
                now=clock(),
                session_id=session_of(parse_path(target).run_id),
                after={"job": job.id},
            )
            return target

        try:
            return await self._written(attempt, write)
        except Unavailable:
            raise
        except (WeftError, AttemptEnds):
            await asyncio.to_thread(self._runtime.data_folder.remove, directory_of(job.checkpoint))
            raise


@dataclass(frozen=True, slots=True)
class _Merge:
    """Folders of base and adapter, and the folder and data type that the merged model is to have."""

    base: Path
    adapter: Path
    directory: Path
    dtype: str | None


def _write(merge: _Merge, attempt: _Attempt, room: int) -> int:
    """Write the merged model and return its size in bytes, on a thread. Raises ``InvalidRequest``, ``AttemptEnds``."""
    merged = MergeSource(merge.base, merge.adapter, merge.dtype)
    if merged.total_bytes > room:
        raise InvalidRequest(
            f"the merged model would take {merged.total_bytes} bytes, and your storage has room for {max(room, 0)}; delete "
            "some checkpoints"
        )
    return write_atomically(merge.directory, lambda folder: merged.write(folder, attempt.progress))


def _remove(directory: Path) -> None:
    """Remove what an attempt has left, whole or half-written."""
    for left in [*directory.parent.glob(f".{directory.name}.*"), directory]:
        shutil.rmtree(left, ignore_errors=True)
