"""Puts an adapter's training state into the trainer's memory: a fresh state, a checkpoint's, or the run's own earlier state.

A run's own state begins as its newest snapshot, read from disk. The operations after the snapshot are then applied again as
ordinary work (``workers.training.lanes``).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from weakref import WeakValueDictionary

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import (
    EngineFailure,
    InvalidRequest,
    LeaseLost,
    NotFound,
    PoisonOperation,
    RunUnloaded,
    Unavailable,
)
from contracts.ids import CheckpointId, RequestId, RunId
from contracts.ledger_records import PendingOperation, ReadyOperation, RunLease, lease_of
from contracts.operations import LoadWeights, LoraSettings, OperationKind
from contracts.paths import Segment, parse_path
from engine.training.adapter_state import AdapterState, read_state
from engine.training.checkpoint_files import read_checkpoint
from engine.training.trainer import fresh_state, loaded_state
from ledger.runtime import Runtime
from ledger.statements import MAX_PENDING
from store.fair_places import OWN_WORK, FairPlaces, Owner
from store.tables import Run, RunState
from store.unread_files import UnreadFiles
from tenants.checkpoint_holds import find_loaded, held_checkpoint
from tenants.checkpoints import CHECKPOINTS, SNAPSHOTS, directory_of
from tenants.run_history import RunEventKind, note_run_events, was_restored
from tenants.runs import get_run, lora_settings
from workers.training.lanes import Rebuild
from workers.training.training_engine import TrainingEngine

log = logging.getLogger(__name__)


_RESTORES_OF_A_TENANT = 2
"""Runs of one tenant that are restored at the same time: half of those whose files are read at the same time."""


@dataclass(frozen=True, slots=True)
class RestoredAdapter:
    """A state in the trainer's memory, the last operation that the run's snapshot covers, and what the state lacks."""

    state: AdapterState
    snapshot_seq_id: int
    rebuild: Rebuild


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A training checkpoint's state."""

    id: CheckpointId
    state: AdapterState


class CheckpointUnread(Exception):
    """A checkpoint's files cannot be read now. Nothing has changed."""


class SnapshotUnread(CheckpointUnread):
    """A file from which a run is restored cannot be read now. Nothing has changed, and nothing of the run is in memory."""


class AdapterRestorer:
    """Makes adapters' states and puts them into one base model's trainer."""

    def __init__(self, runtime: Runtime, engine: TrainingEngine, files: FairPlaces) -> None:
        """Read in places of ``files``."""
        self._database = runtime.database
        self._ledger = runtime.ledger
        self._data_folder = runtime.data_folder
        self._clock = runtime.clock
        self._trainer = engine.trainer
        self._compute = engine.compute
        self._tenant_turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._telemetry = engine.telemetry
        self._files = files
        self._in_hand = engine.in_hand
        self._most_attempts = runtime.settings.max_attempts
        self._unread_snapshots = UnreadFiles(runtime.data_folder, SNAPSHOTS)
        self._unread_checkpoints = UnreadFiles(runtime.data_folder, CHECKPOINTS)

    async def restore(self, operation: ReadyOperation) -> RestoredAdapter:
        """Put the run's newest snapshot into the trainer, or what the run was created with.

        The operations since then are to be applied again. Raises ``WeftError``, and ``SnapshotUnread`` for a file that cannot
        be read now.
        """
        # Few at a time of one tenant, so that a tenant with many runs does not stand before the others.
        turn = self._tenant_turns.setdefault(operation.tenant, asyncio.Semaphore(_RESTORES_OF_A_TENANT))
        async with turn:
            return await self._restore(operation)

    async def _restore(self, operation: ReadyOperation) -> RestoredAdapter:
        began, run_id, lease = perf_counter(), RunId(operation.lane), lease_of(operation)
        async with self._database.read() as session:
            run = await get_run(session, operation.tenant, run_id)
            if run.state in (RunState.UNLOADED, RunState.FAILED):
                raise RunUnloaded(f"model {run_id} was unloaded, or never made")
            if RunLease(run.trainer_id or "", run.lease_token) != lease:
                raise LeaseLost(f"model {run_id} is trained elsewhere by now")
            is_told = await was_restored(session, run_id, run.lease_token)
            replays = await self._read_replays(session, run, lease)
        log.debug("restoring run=%s snapshot_seq=%d next_seq=%d", run.id, run.snapshot_seq_id, run.next_seq_id)
        replayed = len(replays)
        if run.snapshot_dir is not None:
            state = await self._read_snapshot(run.snapshot_dir, operation)
        else:
            state = await self._create_again(run, replays.pop(0) if replays else None, operation)
        await self._compute.run(partial(self._trainer.put, run_id, state))
        if replayed or not is_told:
            await self._note(run, replayed)
        if not replays:
            self._telemetry.restored(replayed=replayed, seconds=perf_counter() - began)
        return RestoredAdapter(state, run.snapshot_seq_id, Rebuild(run.next_seq_id, replays, replayed, began))

    async def _read_replays(self, session: AsyncSession, run: Run, lease: RunLease) -> list[PendingOperation]:
        """Return the operations since the run's snapshot, without payloads."""
        found: list[PendingOperation] = []
        reached, is_more = run.snapshot_seq_id, run.snapshot_seq_id < run.next_seq_id - 1
        while is_more:
            some = await self._ledger.operations_to_replay(
                session, RunId(run.id), lease.trainer, after_seq_id=reached, before_seq_id=run.next_seq_id
            )
            found += some
            is_more = len(some) == MAX_PENDING
            reached = some[-1].seq_id if some else reached
        return found

    @asynccontextmanager
    async def _place(self, owner: Owner, begins: Sequence[RequestId]) -> AsyncIterator[None]:
        """Hold a place of ``owner``, and record that the operations ``begins`` have begun."""
        async with self._files.place_of(owner):
            self._in_hand.begin(*begins)
            yield

    async def _read_snapshot(self, directory: str, operation: ReadyOperation) -> AdapterState:
        async with self._place(operation.tenant, [operation.id]):
            try:
                state = await asyncio.to_thread(read_state, self._data_folder.path(directory), self._trainer.base)
            except Unavailable as outage:
                unread = outage
            else:
                self._unread_snapshots.forget(directory)
                return state
        if await self._unread_snapshots.is_lost(directory):
            # Noted on: the operations that come next need not wait for it anew, and each has it tried once.
            raise EngineFailure("its snapshot's file cannot be read") from unread
        raise SnapshotUnread(unread.message) from unread

    async def _create_again(self, run: Run, first: PendingOperation | None, operation: ReadyOperation) -> AdapterState:
        """Return the state that the run's creation made, for ``operation``. Raises ``WeftError`` and ``SnapshotUnread``."""
        if first is None:
            raise EngineFailure("the run has neither a snapshot nor a creation")
        async with self._database.read() as session:
            loaded = await self._ledger.load(session, [first.id])
        if not loaded:
            raise Unavailable(f"operation {first.seq_id} cannot be read now")
        (creation,) = loaded
        if creation.attempts >= self._most_attempts:
            raise PoisonOperation(f"{creation.attempts} trainers ended at the creation (request {creation.id})")
        begins = [operation.id, creation.id]
        with self._in_hand.waiting(creation.id):
            if isinstance(creation.payload, LoadWeights):
                return await self._read_creation(creation, creation.payload, begins)
            if creation.kind is not OperationKind.CREATE_MODEL:
                raise EngineFailure(f"replay cannot begin with operation {creation.seq_id}, a {creation.kind}")
            return await self._fresh(lora_settings(run), creation.tenant, begins)

    async def _read_creation(
        self, creation: ReadyOperation, load: LoadWeights, begins: Sequence[RequestId]
    ) -> AdapterState:
        try:
            found = await self.read_checkpoint(creation, load, creation.tenant, begins)
        except CheckpointUnread as unread:
            if await self._unread_checkpoints.is_lost(creation.id):
                raise EngineFailure("its checkpoint's file cannot be read") from unread
            raise SnapshotUnread(str(unread)) from unread
        self._unread_checkpoints.forget(creation.id)
        return found.state

    async def _note(self, run: Run, replayed: int) -> None:
        """Note the restore in the run's history: the first under a lease, and every one that replays operations."""
        kind = RunEventKind.REPLAYED if replayed else RunEventKind.RESTORED
        detail = f"snapshot of seq_id {run.snapshot_seq_id}, {replayed} operations after it"
        # The history is not worth a failed restore.
        with suppress(Unavailable):
            async with self._database.write() as transaction:
                await note_run_events(
                    transaction, [run.id], kind, trainer=run.trainer_id, now=self._clock(), detail=detail
                )

    async def put_fresh(self, run: RunId, settings: LoraSettings, operation: ReadyOperation) -> AdapterState:
        """Put a fresh adapter into the trainer for ``operation`` and return its state. Raises ``InvalidRequest``."""
        # Creations come one at a time, and everybody's wait for each.
        state = await self._fresh(settings, OWN_WORK, [operation.id])
        await self._compute.run(partial(self._trainer.put, run, state))
        return state

    async def _fresh(self, settings: LoraSettings, owner: Owner, begins: Sequence[RequestId]) -> AdapterState:
        async with self._place(owner, begins):
            return await asyncio.to_thread(fresh_state, self._trainer.base, settings)

    async def read_checkpoint(
        self, operation: ReadyOperation, load: LoadWeights, owner: Owner, begins: Sequence[RequestId]
    ) -> LoadedCheckpoint:
        """Return the state that the operation's adapter is to get from a training checkpoint.

        Raises ``WeftError``, and ``CheckpointUnread`` for files that cannot be read now. It is read in a turn of ``owner``,
        in which the operations ``begins`` begin.
        The checkpoint is the one that was recorded for the operation, whatever its name stands for by now.
        """
        path = parse_path(load.path, segment=Segment.WEIGHTS)
        async with self._database.read() as session:
            run = await get_run(session, operation.tenant, operation.lane)
            checkpoint = await held_checkpoint(session, operation.tenant, operation.id)
            if checkpoint is None:
                granted = None if load.granted is None else CheckpointId(load.granted)
                found_now, source = await find_loaded(session, operation.tenant, path, granted, self._clock)
                if source.base_model != run.base_model:
                    raise NotFound(
                        f"checkpoint {path} is of base model {source.base_model}, this model's is {run.base_model}"
                    )
                checkpoint = CheckpointId(found_now.id)
        run_id, directory = RunId(operation.lane), self._data_folder.path(directory_of(checkpoint))
        async with self._place(owner, begins):
            read = partial(read_checkpoint, directory, self._trainer.base, optimizer=load.optimizer)
            try:
                found = await asyncio.to_thread(read)
            except Unavailable as outage:
                raise CheckpointUnread(outage.message) from outage
        if not load.creates:
            found = loaded_state(self._trainer.state(run_id), found)
            # What has been loaded once is loaded again by its replays.
            if not operation.is_replay:
                _check_optimizer(run, found)
        return LoadedCheckpoint(checkpoint, found)


def _check_optimizer(run: Run, found: AdapterState) -> None:
    """Raise ``InvalidRequest`` when a state has moments that no step of the run could use."""
    if found.optimizer is not None and found.optimizer.name != run.optimizer:
        raise InvalidRequest(
            f"path: the checkpoint has the optimizer state of {found.optimizer.name}, and this model trains with "
            f"{run.optimizer}; load it without its optimizer state (load_state), or make a training client from the "
            "checkpoint (create_training_client_from_state_with_optimizer)"
        )
