"""Runs jobs on weights, one at a time in a process: takes a job, has it worked on beside, and tells its progress meanwhile.

The work is that of a process of its own (``JobProcess``), which knows no database: it writes files. A job whose worker dies, or
whose work does or makes no progress, is free when its lease ends, and begins again. Each attempt writes a folder of its own,
which only the holder of the lease records. Work that is done is not done again because the database cannot take its
record: the worker keeps the job and tries again, while it goes on with other jobs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import monotonic
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Cancelled, EngineFailure, InvalidRequest, PoisonOperation, Unavailable, WeftError
from contracts.ids import TenantId
from contracts.paths import CheckpointPath, Segment, parse_path
from contracts.weight_jobs import ImportRequest, JobState, MergeRequest
from engine.model.adapter_import import ImportBounds
from engine.model.base import BaseModel
from ledger.runtime import Runtime
from ledger.wakeups import JOBS
from store.repeat import repeat, wait_for_any
from tenants.audit import Actor, Door, session_of
from tenants.audit import record as record_entry
from tenants.audit_actions import Action
from tenants.checkpoints import NewCheckpoint, directory_of, find_checkpoint, is_path_taken
from tenants.imported_checkpoints import ImportedCheckpoint, record_import
from tenants.limits import Counted, Limits, hold_count, limits_of
from tenants.project_limits import RANK, smaller, use_in_session
from tenants.storage import room_in_session, store_checkpoint
from tenants.taken_jobs import LEASE, TakenJob, finish_job, free_all, give_back, recorded_path, renew_job, take_job
from tenants.weight_jobs import ARCHIVE, staged_folder
from workers.jobs.attempt import Attempt, AttemptEnds
from workers.jobs.computing import remove_left
from workers.jobs.job_process import JobProcess, JobProcessEnded, WorkFailed, WorkPostponed
from workers.jobs.postponements import Postponements
from workers.jobs.work import ImportWork, Made, MergeWork, Work

log = logging.getLogger(__name__)

T = TypeVar("T")

SWEEP_SECONDS = 5.0
_RETRY_SECONDS = 1.0
"""Time between two tries to record how a job ended."""
_RENEW_SECONDS = LEASE.total_seconds() / 6


class JobRunner:
    """Worker of the jobs for ``bases``, in a cluster called by Celery tasks, in ``weft serve`` by ``run``."""

    def __init__(self, runtime: Runtime, bases: Mapping[str, BaseModel], process: JobProcess) -> None:
        """Look at ``bases``, which their trainers load, by name at each look for jobs: none is taken before its base is there.

        ``process`` does the work, and is closed by ``finished``.
        """
        self._runtime = runtime
        self._process = process
        self._bases = bases
        self._defaults = Limits.of(runtime.settings)
        self._lock = asyncio.Lock()
        self._postponements = Postponements(runtime.data_folder)
        self._current: Attempt | None = None
        self._unrecorded: set[asyncio.Task[None]] = set()
        """Attempts whose work is done, and whose record the database has not taken yet."""
        self._recording = asyncio.Lock()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Run jobs as they come until ``stop``."""
        with self._runtime.wakeups.listen(JOBS) as wake:
            failed = "jobs on weights could not be run"
            await repeat(self.run_all, seconds=SWEEP_SECONDS, stopping=self._stopping, wake=wake, failed=failed)
        await self.finished()

    def stop(self) -> None:
        """Give the job in hand back, and take no more."""
        self._stopping.set()
        if self._current is not None:
            self._current.ends.set()

    async def finished(self) -> None:
        """Wait until no job is in hand and the work's process has ended, after ``stop``."""
        async with self._lock:
            await self._process.close()
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
        """Run jobs until none is left but postponed ones. Return at once with a job in hand. Raises ``Unavailable``."""
        if self.is_busy:
            return
        async with self._lock:
            self._postponements.begin_round()
            while not self._stopping.is_set() and await self._run_next():
                pass

    async def _run_next(self) -> bool:
        async with self._runtime.database.write() as transaction:
            but = self._postponements.of_round
            job = await take_job(transaction, list(self._bases), self._runtime.clock(), but=but)
        if job is None:
            return False
        self._current = attempt = Attempt(job)
        working = asyncio.create_task(self._hold(attempt), name=f"job {job.id}")
        waiting = asyncio.create_task(attempt.waits.wait())
        is_left = False
        try:
            await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
            if is_left := not working.done():
                self._unrecorded.add(working)
                working.add_done_callback(self._recorded)
                return True
        finally:
            self._current = None
            waiting.cancel()
            if not is_left:
                working.cancel()
        await working
        return True

    async def _hold(self, attempt: Attempt) -> None:
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
        if not working.cancelled() and (failure := working.exception()) is not None:
            log.error(
                "%s was not recorded; it begins again once its lease has ended", working.get_name(), exc_info=failure
            )

    async def _renew(self, attempt: Attempt, ended: asyncio.Event) -> None:
        """Keep the lease while the attempt makes progress, and while its record waits for the database."""
        limit = self._runtime.settings.stall_limit.total_seconds()

        async def renew() -> None:
            still = 0.0 if attempt.moved is None else monotonic() - attempt.moved
            if not attempt.waits.is_set() and still > limit:
                log.error("job=%s has made no progress for %.0f s; its lease is given up", attempt.job.id, still)
                attempt.is_stalled = True
                attempt.ends.set()
                ended.set()
                return
            now, job = self._runtime.clock(), attempt.job
            async with self._runtime.database.write() as transaction:
                if not await renew_job(transaction, job, done=attempt.done, total=attempt.total, now=now):
                    attempt.ends.set()

        await repeat(renew, seconds=_RENEW_SECONDS, stopping=ended, failed="a job's lease could not be renewed")

    async def _attempt(self, attempt: Attempt) -> None:
        job = attempt.job
        log.info("job=%s attempt=%d begins", job.id, job.attempts)
        try:
            if job.attempts > self._runtime.settings.max_attempts:
                raise PoisonOperation(
                    f"{job.attempts - 1} attempts of this job ended with their process, made no progress or could not read a "
                    "file; it is not tried again"
                )
            match job.asked:
                case MergeRequest() as merge:
                    path = await self._merge(attempt, merge)
                case ImportRequest() as asked:
                    path = await self._import(attempt, asked)
        except AttemptEnds:
            await self._interrupted(attempt)
        except JobProcessEnded:
            log.error("job=%s attempt=%d ended with the process of its work", job.id, job.attempts)
        except WorkPostponed as postponed:
            counts = await self._postponements.add(job.id)
            log.warning("job=%s attempt=%d is postponed: %s", job.id, job.attempts, postponed)
            await self._written(attempt, partial(give_back, job=job, counts=counts))
        except Unavailable:
            if not attempt.waits.is_set():
                # The work could not begin, for which the job is not to blame.
                await self._written(attempt, partial(give_back, job=job))
            raise
        except WeftError as error:
            await self._end(attempt, error, JobState.FAILED)
        except WorkFailed:
            # A full disk, no memory, a damaged file of the base or of the checkpoint.
            log.exception("job=%s failed", job.id)
            message = f"weft failed to run this job; the service's log has the cause (job {job.id})"
            await self._end(attempt, EngineFailure(message), JobState.FAILED)
        else:
            log.info("job=%s done path=%s", job.id, path)
            await self._drop_staged(job)

    async def _interrupted(self, attempt: Attempt) -> None:
        if attempt.is_stalled:
            # Whoever takes the job, once the lease has ended, begins again.
            return
        directory = self._runtime.data_folder.path(directory_of(attempt.job.checkpoint))
        await asyncio.to_thread(remove_left, directory)
        if self._stopping.is_set():
            await self._written(attempt, partial(give_back, job=attempt.job))
            return
        # Cancelled; or another worker's, and then nothing is written.
        await self._end(attempt, Cancelled("the job was cancelled by its tenant"), JobState.CANCELLED)

    async def _end(self, attempt: Attempt, error: WeftError, state: JobState) -> None:
        async def write(transaction: AsyncSession) -> bool:
            return await finish_job(transaction, attempt.job, error, state=state, now=self._runtime.clock())

        if await self._written(attempt, write):
            await self._drop_staged(attempt.job)

    async def _written(self, attempt: Attempt, write: Callable[[AsyncSession], Awaitable[T]]) -> T:
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

    async def _work(self, attempt: Attempt, work: Work) -> Made:
        """Have ``work`` done. Raises ``AttemptEnds`` once the attempt is to end, with the work ended."""

        async def do() -> Made:
            await self._process.ready()
            attempt.moved = monotonic()
            made = await self._process.do(work, attempt.progress)
            attempt.moved = None
            return made

        working, ending = asyncio.create_task(do()), asyncio.create_task(attempt.ends.wait())
        try:
            await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise AttemptEnds
            return working.result()
        finally:
            ending.cancel()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    # --- merges ----------------------------------------------------------------------------------------------------

    async def _merge(self, attempt: Attempt, asked: MergeRequest) -> str:
        job = attempt.job
        path = parse_path(asked.path)
        target = CheckpointPath(path.run_id, Segment.EXTERNAL_WEIGHTS, asked.name)
        async with self._runtime.database.read() as session:
            source, run = await find_checkpoint(session, job.tenant, path, self._runtime.clock)
            await _check_free(session, job.tenant, target)
            room = await room_in_session(session, job.tenant, session_of(run.id), self._defaults)
        folder, base = self._runtime.data_folder, self._bases[run.base_model]
        work = MergeWork(
            base=base.facts.path,
            # Read in a thread: the headers of the base's files are read.
            names=await asyncio.to_thread(lambda: base.names),
            adapter=folder.path(source.directory),
            directory=folder.path(directory_of(job.checkpoint)),
            abandoned=folder.path(directory_of(job.abandoned)),
            dtype=asked.dtype,
            room=room,
        )
        size = (await self._work(attempt, work)).size_bytes
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
            # Again: another job or a save may have taken the name meanwhile.
            await _check_free(transaction, job.tenant, target)
            await store_checkpoint(transaction, job.tenant, new, self._runtime.clock, self._defaults)
            return target

        return await self._record(attempt, record)

    # --- imports ---------------------------------------------------------------------------------------------------

    async def _import(self, attempt: Attempt, asked: ImportRequest) -> str:
        job, settings, folder = attempt.job, self._runtime.settings, self._runtime.data_folder
        bounds = ImportBounds(settings.max_import_bytes, await self._largest_rank(job))
        # Read in a thread: the first time, the whole head is read.
        base = await asyncio.to_thread(lambda: self._bases[job.base_model].outline)
        work = ImportWork(
            archive=folder.path(staged_folder(job.id)) / ARCHIVE,
            directory=folder.path(directory_of(job.checkpoint)),
            abandoned=folder.path(directory_of(job.abandoned)),
            base=base,
            bounds=bounds,
        )
        made = await self._work(attempt, work)
        if made.settings is None:
            raise EngineFailure("the import told no settings of its adapter")
        new = ImportedCheckpoint(
            job.checkpoint,
            job.base_model,
            made.settings,
            asked.segment,
            asked.name,
            made.size_bytes,
            asked.ttl_seconds,
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

    async def _record(self, attempt: Attempt, record: Callable[[AsyncSession], Awaitable[CheckpointPath]]) -> str:
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


async def _check_free(session: AsyncSession, tenant: TenantId, target: CheckpointPath) -> None:
    """Raise ``InvalidRequest`` if the run has this checkpoint. Exact in a transaction that holds ``Counted.STORAGE``."""
    if await is_path_taken(session, tenant, target):
        raise InvalidRequest(f"name: the run has a checkpoint {target.checkpoint_id} already; choose another name")
