"""Which adapters are in the trainer's memory, how they leave it and come back: durable snapshot + replay.

Invariants: what the trainer holds for a run equals the effect of every operation of its lane up to ``applied_seq_id``; a
snapshot is recorded only once the completions it covers are written. Whenever memory is in doubt the adapter is forgotten
and rebuilt from the ledger. States are values, so a snapshot is a reference until the file is written, beside training.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from sqlalchemy import select, update

from contracts.errors import EngineFailure, NotFound, RunUnloaded, WeftError
from contracts.ids import RunId, TenantId
from contracts.ledger_records import ReadyOperation, RunLease, lease_of
from contracts.operations import LoadWeights, LoraSettings, OperationKind, OptimStep, TrainingBatch
from contracts.paths import Segment, parse_path
from engine.training.adapter_state import AdapterState, largest_nbytes, read_state, write_state
from engine.training.checkpoint_files import read_checkpoint
from engine.training.pass_operation import PassItem
from engine.training.trainer import Trainer, fresh_state, loaded_state
from ledger.ledger import Ledger
from store.clock import Clock
from store.data_folder import DataFolder
from store.database import Database
from store.tables import Run, RunState
from telemetry.training import TrainingTelemetry
from tenants.checkpoints import SNAPSHOTS, find_checkpoint, new_checkpoint_id
from tenants.runs import get_run, lora_settings
from workers.compute_thread import ComputeThread
from workers.training.statistics import TrainingStatistics

log = logging.getLogger(__name__)

MAX_FILES_AT_ONCE = 4
"""Adapters read or written at the same time."""


@dataclass(slots=True)
class _Resident:
    """A resident adapter: last operation applied, last one a snapshot covers, when last used, bytes kept for it."""

    tenant: TenantId
    lease: RunLease
    applied_seq_id: int
    snapshot_seq_id: int
    nbytes: int
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A run's state after operation ``seq_id``, and the bytes kept for it."""

    run: RunId
    tenant: TenantId
    lease: RunLease
    seq_id: int
    state: AdapterState
    nbytes: int


class AdapterResidency:
    """Brings adapters in, snapshots them, lets them go. Called from the event loop, by one worker."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        compute: ComputeThread,
        database: Database,
        ledger: Ledger,
        data_folder: DataFolder,
        clock: Clock,
        snapshot_operations: int,
        memory_bytes: int,
        statistics: TrainingStatistics,
        telemetry: TrainingTelemetry,
    ) -> None:
        """``memory_bytes`` is kept for weights, gradients and moments together; one adapter is held in any case."""
        self._trainer = trainer
        self._compute = compute
        self._database = database
        self._ledger = ledger
        self._data_folder = data_folder
        self._clock = clock
        self._snapshot_operations = snapshot_operations
        self._memory_bytes = memory_bytes
        self._statistics = statistics
        self._telemetry = telemetry
        self._residents: dict[RunId, _Resident] = {}
        self._leaving: dict[RunId, _Snapshot] = {}
        self._writes: dict[RunId, asyncio.Task[None]] = {}
        self._files = asyncio.Semaphore(MAX_FILES_AT_ONCE)
        self._uses = 0
        self._drain: Callable[[RunId], Awaitable[None]] = _nothing_to_wait_for
        self._left: Callable[[], None] = _nobody_to_tell

    def work_with(self, *, drain: Callable[[RunId], Awaitable[None]], left: Callable[[], None]) -> None:
        """``drain`` returns once the run's completions so far are written, or lost; ``left`` hears that there is more room."""
        self._drain = drain
        self._left = left

    # --- coming in -------------------------------------------------------------------------------------------------

    def holds(self, run: RunId) -> bool:
        """Whether the run's adapter is in memory, or on its way out of it and so at hand."""
        return run in self._residents

    def is_away(self, run: RunId) -> bool:
        """Whether nothing of the run is in memory or on its way to disk."""
        return not (run in self._residents or run in self._leaving or run in self._writes)

    def lease_of(self, run: RunId) -> RunLease | None:
        """The lease under which the run's adapter came into memory, None when it is not there."""
        there = self._residents.get(run) or self._leaving.get(run)
        return None if there is None else there.lease

    async def bring_in(self, operation: ReadyOperation) -> None:
        """Have the operation's adapter in memory. Raises ``WeftError`` when it cannot be rebuilt."""
        run_id = RunId(operation.lane)
        leaving = self._leaving.get(run_id)
        if leaving is not None:
            await self._hold(run_id, leaving)
            return
        if (writing := self._writes.get(run_id)) is not None:
            await asyncio.wait([writing])
        async with self._database.read() as session:
            run = await get_run(session, operation.tenant, run_id)
            if run.state in (RunState.UNLOADED, RunState.FAILED):
                raise RunUnloaded(f"model {run_id} was unloaded, or never made")
            replay = await self._ledger.operations_to_replay(
                session, run_id, after_seq_id=run.snapshot_seq_id, before_seq_id=run.next_seq_id
            )
        started = perf_counter()
        await self._restore(run, replay, lease_of(operation))
        self._telemetry.restored(replayed=len(replay), seconds=perf_counter() - started)
        self._statistics.paged_in += 1
        self._telemetry.paged_in()

    async def _restore(self, run: Run, replay: list[ReadyOperation], lease: RunLease) -> None:
        run_id, tenant = RunId(run.id), TenantId(run.tenant_id)
        log.debug("restoring run=%s snapshot_seq=%d replay=%d", run.id, run.snapshot_seq_id, len(replay))
        try:
            if run.snapshot_dir is not None:
                directory = self._data_folder.path(run.snapshot_dir)
                async with self._files:
                    state = await asyncio.to_thread(read_state, directory, self._trainer.base)
                await self._compute.run(partial(self._trainer.put, run_id, state))
            for operation in replay:
                await self._apply_again(run, operation)
            nbytes = await self._compute.run(lambda: self._nbytes(self._trainer.state(run_id)))
        except WeftError:
            self.forget(run_id)
            raise
        self._note(run_id, _Resident(tenant, lease, run.next_seq_id - 1, run.snapshot_seq_id, nbytes))

    async def _apply_again(self, run: Run, operation: ReadyOperation) -> None:
        run_id = RunId(run.id)
        match operation.payload:
            case TrainingBatch() as batch if operation.kind is OperationKind.FORWARD_BACKWARD:
                item = PassItem(run=run_id, batch=batch, backward=True)
                outcome = (await self._compute.run(partial(self._trainer.run_pass, [item])))[0]
                if isinstance(outcome, WeftError):
                    raise EngineFailure(f"replay of operation {operation.seq_id} failed: {outcome.message}")
            case OptimStep() as step:
                await self._compute.run(partial(self._trainer.optim_step, run_id, step))
            case LoadWeights() as load:
                await self._put_checkpoint(operation, load)
            case _ if operation.kind is OperationKind.CREATE_MODEL:
                await self._put_fresh(run_id, lora_settings(run))

    async def create(self, operation: ReadyOperation, settings: LoraSettings) -> None:
        """A fresh adapter for the operation's run. Raises ``InvalidRequest``."""
        run = RunId(operation.lane)
        state = await self._put_fresh(run, settings)
        self._note(run, _Resident(operation.tenant, lease_of(operation), operation.seq_id, -1, self._nbytes(state)))

    async def _put_fresh(self, run: RunId, settings: LoraSettings) -> AdapterState:
        async with self._files:
            state = await asyncio.to_thread(fresh_state, self._trainer.base, settings)
        await self._compute.run(partial(self._trainer.put, run, state))
        return state

    async def load(self, operation: ReadyOperation, load: LoadWeights) -> None:
        """Put a training checkpoint into the operation's adapter, making it if ``load.creates``. Raises ``WeftError``."""
        run = RunId(operation.lane)
        state = await self._put_checkpoint(operation, load)
        if load.creates:
            self._note(run, _Resident(operation.tenant, lease_of(operation), operation.seq_id, -1, self._nbytes(state)))

    async def _put_checkpoint(self, operation: ReadyOperation, load: LoadWeights) -> AdapterState:
        path = parse_path(load.path, segment=Segment.WEIGHTS)
        async with self._database.read() as session:
            checkpoint, source = await find_checkpoint(session, operation.tenant, path, self._clock)
            run = await get_run(session, operation.tenant, operation.lane)
        if source.base_model != run.base_model:
            raise NotFound(f"checkpoint {path} is of base model {source.base_model}, this model's is {run.base_model}")
        run_id, directory = RunId(operation.lane), self._data_folder.path(checkpoint.directory)
        async with self._files:
            found = await asyncio.to_thread(
                partial(read_checkpoint, directory, self._trainer.base, optimizer=load.optimizer)
            )
        if not load.creates:
            found = loaded_state(self._trainer.state(run_id), found)
        await self._compute.run(partial(self._trainer.put, run_id, found))
        return found

    async def _hold(self, run: RunId, left: _Snapshot) -> None:
        await self._compute.run(partial(self._trainer.put, run, left.state))
        self._note(run, _Resident(left.tenant, left.lease, left.seq_id, -1, self._nbytes(left.state)))

    def _note(self, run: RunId, resident: _Resident) -> None:
        self._residents[run] = resident
        self.touch(run)

    def _nbytes(self, state: AdapterState) -> int:
        """What training it needs: gradient and moments may come and go, their room stays."""
        return largest_nbytes(self._trainer.base, state.weights.settings)

    # --- being there -----------------------------------------------------------------------------------------------

    def applied(self, operation: ReadyOperation) -> None:
        """Note that the operation's effect is in memory."""
        resident = self._residents.get(RunId(operation.lane))
        if resident is not None:
            resident.applied_seq_id = max(resident.applied_seq_id, operation.seq_id)
            self.touch(RunId(operation.lane))

    def touch(self, run: RunId) -> None:
        """Note that the adapter was used."""
        if (resident := self._residents.get(run)) is not None:
            self._uses += 1
            resident.last_used = self._uses

    def has_room(self, run: RunId, *, arriving: int, once_left: bool = False) -> bool:
        """Whether the budget holds the run's adapter beside those in memory, ``arriving`` and on their way out.

        ``once_left`` leaves out the last: their memory is free once they are written. One adapter fits in any case.
        """
        sizes = [resident.nbytes for resident in self._residents.values()]
        if not once_left:
            sizes += [snapshot.nbytes for snapshot in self._leaving.values() if snapshot.run != run]
        # How large an adapter is shows only when it is there: with none to go by, one comes alone.
        return sum(sizes) + (arriving + 1) * max(sizes) <= self._memory_bytes if sizes else not arriving

    def least_recently_used(self, among: Iterable[RunId]) -> RunId | None:
        """The resident run of ``among`` that has not been used for longest."""
        residents = self._residents
        return min((run for run in among if run in residents), key=lambda run: residents[run].last_used, default=None)

    def residents(self) -> list[RunId]:
        """Runs whose adapters are in memory."""
        return list(self._residents)

    # --- leaving ---------------------------------------------------------------------------------------------------

    def forget(self, run: RunId) -> None:
        """Drop the adapter from memory; its next operation rebuilds it."""
        self._residents.pop(run, None)
        self._leaving.pop(run, None)
        self._compute.submit(partial(self._trainer.unload, run))

    def page_out(self, run: RunId) -> None:
        """Let the adapter go, weights, gradient, moments and step count; no operation of its may be under way."""
        snapshot, resident = self._capture(run), self._residents.pop(run)
        self._compute.submit(partial(self._trainer.unload, run))
        self._statistics.paged_out += 1
        self._telemetry.paged_out()
        if snapshot.seq_id > resident.snapshot_seq_id:
            self._leaving[run] = snapshot
            self._begin(snapshot)

    def snapshot_if_due(self, run: RunId) -> None:
        """Begin a snapshot once enough operations came after the last; no operation of the run may be under way."""
        resident = self._residents.get(run)
        if resident and resident.applied_seq_id - resident.snapshot_seq_id >= self._snapshot_operations:
            self.snapshot(run)

    def snapshot(self, run: RunId) -> None:
        """Begin to write the run's whole training state durably, if anything came after its last snapshot."""
        resident = self._residents.get(run)
        if resident is not None and resident.applied_seq_id > resident.snapshot_seq_id and run not in self._writes:
            self._begin(self._capture(run))

    async def snapshot_all(self) -> None:
        """Snapshot every resident run: an orderly end replays nothing at the next start."""
        await self._writes_done()
        for run in self.residents():
            self.snapshot(run)
        await self._writes_done()

    async def _writes_done(self) -> None:
        while self._writes:
            await asyncio.wait(list(self._writes.values()))

    def _capture(self, run: RunId) -> _Snapshot:
        resident = self._residents[run]
        state = self._trainer.state(run)
        return _Snapshot(run, resident.tenant, resident.lease, resident.applied_seq_id, state, resident.nbytes)

    def _begin(self, snapshot: _Snapshot) -> None:
        before = self._writes.get(snapshot.run)
        task = asyncio.create_task(self._write(snapshot, before), name=f"snapshot {snapshot.run}")
        self._writes[snapshot.run] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self._writes.get(snapshot.run) is done:
                del self._writes[snapshot.run]
            if self._leaving.get(snapshot.run) is snapshot:
                del self._leaving[snapshot.run]
                self._left()

        task.add_done_callback(ended)

    async def _write(self, snapshot: _Snapshot, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            await self._drain(snapshot.run)
            if self._is_known(snapshot):
                await self._record(snapshot)
        except Exception:
            # Nothing is lost: the ledger keeps what is needed to rebuild the run from its last snapshot.
            self._telemetry.snapshot_failed()
            log.exception("snapshot failed run=%s", snapshot.run)

    def _is_known(self, snapshot: _Snapshot) -> bool:
        """Whether the run was not forgotten meanwhile, for then its completions may not all have been written."""
        return snapshot.run in self._residents or snapshot.run in self._leaving

    async def _record(self, snapshot: _Snapshot) -> None:
        started = perf_counter()
        relative = f"{SNAPSHOTS}/{new_checkpoint_id()}"
        directory = self._data_folder.path(relative)
        async with self._files:
            await asyncio.to_thread(write_state, directory, self._trainer.base, snapshot.state)
        async with self._database.write() as transaction:
            previous = await transaction.scalar(select(Run.snapshot_dir).where(Run.id == snapshot.run))
            moved = await transaction.scalar(
                update(Run)
                .where(Run.id == snapshot.run, Run.tenant_id == snapshot.tenant, Run.state == RunState.READY)
                .where(Run.snapshot_seq_id < snapshot.seq_id, Run.next_seq_id > snapshot.seq_id)
                .where(Run.trainer_id == snapshot.lease.trainer, Run.lease_token == snapshot.lease.token)
                .values(snapshot_seq_id=snapshot.seq_id, snapshot_dir=relative)
                .returning(Run.id)
            )
        if (resident := self._residents.get(snapshot.run)) is not None and moved is not None:
            resident.snapshot_seq_id = max(resident.snapshot_seq_id, snapshot.seq_id)
        if moved is not None:
            self._telemetry.snapshot_written(seconds=perf_counter() - started)
        stale = previous if moved is not None else relative
        if stale is not None:
            await asyncio.to_thread(self._data_folder.remove, stale)


async def _nothing_to_wait_for(_run: RunId) -> None:
    return


def _nobody_to_tell() -> None:
    return
