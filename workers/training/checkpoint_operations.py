"""Runs the operations on whole adapters: create, save, load, unload. Each writes its outcome in one transaction at its end.

The operations run beside the passes of other runs: other threads read and write files, the compute thread only swaps
states.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic, perf_counter

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import EngineFailure, InvalidRequest, RunUnloaded, Unavailable, WeftError
from contracts.ids import CheckpointId, RunId, SessionId, TenantId
from contracts.ledger_records import Completion, ReadyOperation
from contracts.operations import (
    ExternalWeightsSaved,
    LoadWeights,
    ModelCreated,
    ModelUnloaded,
    Result,
    SamplerWeightsSaved,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    WeightsLoaded,
    WeightsSaved,
)
from contracts.paths import CheckpointPath, Segment
from engine.model.external_files import write_external_files
from engine.training.adapter_state import AdapterState
from engine.training.checkpoint_files import write_checkpoint
from ledger.runtime import Runtime
from ledger.wakeups import versions_topic
from store.sampled_bases import check_can_be_sampled
from store.tables import RunState
from store.unread_files import UnreadFiles
from tenants.audit import actor_of_operation, record, session_of
from tenants.audit_actions import Action
from tenants.checkpoint_holds import Load, hold
from tenants.checkpoints import CHECKPOINTS, NewCheckpoint, directory_of, is_path_taken, new_checkpoint_id
from tenants.limits import Counted, Limits, hold_count, limits_of
from tenants.runs import get_run, lora_settings, open_run_within_limit, set_run_state
from tenants.samplers import NewSampler, create_sampler, publish_live
from tenants.storage import check_projects_storage, check_storage, store_checkpoint
from tenants.training_snapshots import snapshot_directory
from tenants.webhook_events import tell_failed_run
from workers.training.adapter_restorer import CheckpointUnread, LoadedCheckpoint
from workers.training.residency import AdapterResidency
from workers.training.training_engine import TrainingEngine

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
"""Time between two tries while the data folder is away."""
_PREPARE_SECONDS = 30.0
"""Time in which a version that was written is offered again to samplers that cannot read it."""


class CheckpointOperations:
    """Runs operations on whole adapters. Each method writes its own completion and raises ``WeftError`` on failure."""

    def __init__(self, runtime: Runtime, engine: TrainingEngine, residency: AdapterResidency) -> None:
        self._database = runtime.database
        self._ledger = runtime.ledger
        self._data_folder = runtime.data_folder
        self._clock = runtime.clock
        self._publication = runtime.publication
        self._engine = engine
        self._residency = residency
        self._settings = runtime.settings
        self._defaults = Limits.of(runtime.settings)
        self._unread = UnreadFiles(runtime.data_folder, CHECKPOINTS)

    async def create(self, operation: ReadyOperation) -> bool:
        """Make the adapter with the settings recorded for the run. Return False if its tenant may open no more runs."""
        async with self._database.read() as session:
            run = await get_run(session, operation.tenant, operation.lane)
        await self._residency.create(operation, lora_settings(run))
        async with self._database.write() as transaction:
            if not await self._open(transaction, operation):
                return False
            await self._complete(transaction, operation, ModelCreated(model_id=run.id))
        return True

    async def load(self, operation: ReadyOperation, load: LoadWeights) -> bool:
        """Load a training checkpoint, into a new adapter when ``load.creates``.

        Return False if its tenant may open no more runs. Raises ``CheckpointUnread``: nothing has changed then.
        """
        found = await self._read(operation, load)
        run = RunId(operation.lane)
        async with self._database.write() as transaction:
            if load.creates and not await self._open(transaction, operation):
                return False
            held = Load(operation.tenant, operation.id, run, operation.seq_id)
            await hold(transaction, held, found.id, self._clock, is_late=True)
            await self._complete(transaction, operation, WeightsLoaded(path=load.path, model_id=run))
        # Afterwards, so that an operation that could not be recorded has not changed the adapter.
        await self._residency.take(operation, load, found.state)
        return True

    async def load_again(self, operation: ReadyOperation, load: LoadWeights) -> None:
        """Apply a load whose outcome is recorded already. Raises ``CheckpointUnread``: nothing has changed then."""
        found = await self._read(operation, load)
        await self._residency.take(operation, load, found.state)

    async def _read(self, operation: ReadyOperation, load: LoadWeights) -> LoadedCheckpoint:
        try:
            found = await self._residency.read_checkpoint(operation, load)
        except CheckpointUnread as unread:
            if not await self._unread.is_lost(operation.id):
                raise
            self._unread.forget(operation.id)
            raise EngineFailure(f"the checkpoint's file cannot be read (request {operation.id})") from unread
        self._unread.forget(operation.id)
        return found

    async def _open(self, transaction: AsyncSession, operation: ReadyOperation) -> bool:
        return await open_run_within_limit(transaction, operation.tenant, operation.lane, self._defaults)

    async def save(self, operation: ReadyOperation, save: SaveWeights) -> None:
        """Write a training checkpoint: weights and optimiser state."""
        path = CheckpointPath(operation.lane, Segment.WEIGHTS, save.name)
        if not save.overwrite:
            await self._check_path_free(operation, path)
        await self._check_room(operation, coming=0 if save.overwrite else 1)
        checkpoint, size = await self._write(operation, self._with_optimizer)
        new = NewCheckpoint(
            id=checkpoint,
            run_id=RunId(operation.lane),
            segment=Segment.WEIGHTS,
            name=save.name,
            size_bytes=size,
            ttl_seconds=save.ttl_seconds,
            listed=True,
            user_metadata=save.user_metadata,
        )
        async with self._removed_unless_recorded(checkpoint), self._database.write() as transaction:
            await self._record(transaction, operation, new, overwrites=save.overwrite)
            await self._complete(transaction, operation, WeightsSaved(path=str(path)))

    async def save_for_sampler(self, operation: ReadyOperation, save: SaveWeightsForSampler) -> None:
        """Publish an immutable version for sampling. A version without a name gets a sampler of its own."""
        if save.name is not None:
            await self._check_path_free(operation, CheckpointPath(operation.lane, Segment.SAMPLER_WEIGHTS, save.name))
        else:
            await self._check_sampled(operation)
        await self._check_room(operation, coming=1)
        checkpoint, size = await self._write(operation, self._weights_alone)
        new = NewCheckpoint(
            id=checkpoint,
            run_id=RunId(operation.lane),
            segment=Segment.SAMPLER_WEIGHTS,
            name=save.name or f"{save.kind}-{operation.seq_id}-{checkpoint[:8]}",
            size_bytes=size,
            ttl_seconds=save.ttl_seconds,
            listed=save.name is not None,
            user_metadata=save.user_metadata,
        )
        path = CheckpointPath(operation.lane, Segment.SAMPLER_WEIGHTS, new.name)
        is_followed = save.kind == "inflight" and save.name is None
        started = perf_counter()
        async with self._removed_unless_recorded(checkpoint):
            if is_followed:
                await self._prepare(new.run_id, checkpoint)
            async with self._database.write() as transaction:
                await self._record(transaction, operation, new)
                if save.name is not None:
                    result = SamplerWeightsSaved(path=str(path))
                else:
                    result = await self._open_sampler(transaction, operation, save, checkpoint, path)
                await self._complete(transaction, operation, result)
        if is_followed:
            self._engine.telemetry.published(operation, seconds=perf_counter() - started)

    async def _prepare(self, run: RunId, checkpoint: CheckpointId) -> None:
        """Have the samplers' processes load a version, again while one cannot read it.

        After ``_PREPARE_SECONDS`` of that the version is removed and ``Unavailable`` raised: the save begins anew.
        """
        ends = monotonic() + _PREPARE_SECONDS
        while True:
            try:
                await self._publication.prepare(self._engine.base_model, run, checkpoint)
                return
            except Unavailable as outage:
                if monotonic() > ends:
                    # No row can name it yet.
                    await asyncio.to_thread(self._data_folder.remove, directory_of(checkpoint))
                    raise
                log.warning("version=%s cannot be loaded now; trying again: %s", checkpoint, outage.message)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def save_external(self, operation: ReadyOperation, save: SaveWeightsExternal) -> None:
        """Write PEFT's files for use elsewhere, encrypted if the save names recipients."""
        path = CheckpointPath(operation.lane, Segment.EXTERNAL_WEIGHTS, save.name)
        await self._check_path_free(operation, path)
        await self._check_room(operation, coming=1)
        recipients, base = save.age_recipients or (), self._engine.trainer.base

        def write(directory: Path, state: AdapterState) -> int:
            return write_external_files(directory, base, state.weights, recipients)

        checkpoint, size = await self._write(operation, write)
        new = NewCheckpoint(
            id=checkpoint,
            run_id=RunId(operation.lane),
            segment=Segment.EXTERNAL_WEIGHTS,
            name=save.name,
            size_bytes=size,
            ttl_seconds=save.ttl_seconds,
            listed=True,
            user_metadata=None,
        )
        async with self._removed_unless_recorded(checkpoint), self._database.write() as transaction:
            await self._record(transaction, operation, new)
            await self._complete(transaction, operation, ExternalWeightsSaved(str(path), size))

    async def _check_sampled(self, operation: ReadyOperation) -> None:
        """Raise ``InvalidRequest`` before any file is written, if no sampler takes the run's adapter."""
        async with self._database.read() as session:
            run = await get_run(session, operation.tenant, operation.lane)
        facts = self._engine.trainer.base.facts
        check_can_be_sampled(self._settings, facts, rank=run.rank, trains_head=run.train_unembed)

    async def _check_room(self, operation: ReadyOperation, *, coming: int) -> None:
        """Raise ``StorageFull`` before any file is written, if it is clear already."""
        async with self._database.read() as session:
            await check_storage(session, operation.tenant, self._defaults, coming=coming)
            await check_projects_storage(session, operation.tenant, session_of(operation.lane), coming=coming)

    async def _record(
        self, transaction: AsyncSession, operation: ReadyOperation, new: NewCheckpoint, *, overwrites: bool = False
    ) -> None:
        """Record the checkpoint as ``record_checkpoint``. Raises ``StorageFull``, and ``InvalidRequest`` for a name in use."""
        await hold_count(transaction, Counted.STORAGE, [operation.tenant])
        if not overwrites:
            # Again: a job may have taken the name meanwhile.
            await _check_free(transaction, operation.tenant, CheckpointPath(new.run_id, new.segment, new.name))
        await store_checkpoint(transaction, operation.tenant, new, self._clock, self._defaults)
        if new.listed:
            # A version without a name is a step of training.
            path = CheckpointPath(new.run_id, new.segment, new.name)
            told = {"size_bytes": new.size_bytes, "ttl_seconds": new.ttl_seconds}
            await self._tell(transaction, operation, Action.CHECKPOINT_CREATE, str(path), told)

    async def _tell(
        self,
        transaction: AsyncSession,
        operation: ReadyOperation,
        action: Action,
        resource_id: str,
        after: Mapping[str, object] | None = None,
    ) -> None:
        """Write an entry of the audit log about what the operation's request has asked for."""
        await record(
            transaction,
            await actor_of_operation(transaction, operation.id),
            action,
            resource_id,
            tenant=operation.tenant,
            now=self._clock(),
            session_id=session_of(operation.lane),
            after=after,
        )

    @asynccontextmanager
    async def _removed_unless_recorded(self, checkpoint: CheckpointId) -> AsyncIterator[None]:
        """Remove the checkpoint's folder when the block raises."""
        try:
            yield
        except Unavailable:
            # The row may have been written although the commit failed. If not, housekeeping removes the folder that no row names.
            raise
        except WeftError:
            await asyncio.to_thread(self._data_folder.remove, directory_of(checkpoint))
            raise

    async def _open_sampler(
        self,
        transaction: AsyncSession,
        operation: ReadyOperation,
        save: SaveWeightsForSampler,
        checkpoint: CheckpointId,
        path: CheckpointPath,
    ) -> SamplerWeightsSaved:
        if save.sampling_session_seq_id is None:
            raise InvalidRequest("save_weights_for_sampler needs path (a name) or sampling_session_seq_id")
        run = await get_run(transaction, operation.tenant, operation.lane)
        is_live = save.kind == "inflight"
        sampler = NewSampler(
            session_id=SessionId(run.session_id),
            sampling_session_seq_id=save.sampling_session_seq_id,
            base_model=run.base_model,
            model_path=None if is_live else str(path),
            checkpoint_id=checkpoint,
            live_run_id=RunId(run.id) if is_live else None,
        )
        limits = await limits_of(transaction, operation.tenant, self._defaults)
        sampler_id = await create_sampler(transaction, operation.tenant, sampler, self._clock, limits)
        if is_live:
            await publish_live(transaction, operation.tenant, RunId(run.id), checkpoint, self._clock)
            self._ledger.wakeups.announce_after_commit(transaction, versions_topic(run.base_model))
        return SamplerWeightsSaved(sampling_session_id=sampler_id)

    async def unload(self, operation: ReadyOperation) -> bool:
        """Drop the adapter for good. Operations that wait behind a gap in its lane fail.

        Return False, changing nothing, if the ledger has an operation that comes next: this trainer has not read it.
        """
        run_id = RunId(operation.lane)
        self._engine.in_hand.begin(operation.id)
        async with self._database.write() as transaction:
            if await self._ledger.has_next(transaction, run_id):
                return False
            snapshot = await snapshot_directory(transaction, operation.tenant, run_id)
            await set_run_state(transaction, operation.tenant, run_id, RunState.UNLOADED)
            await self._ledger.fail_pending(transaction, run_id, RunUnloaded(f"model {run_id} was unloaded"))
            await self._complete(transaction, operation, ModelUnloaded(model_id=run_id))
            await self._tell(transaction, operation, Action.RUN_UNLOAD, run_id)
        self._residency.forget(run_id)
        if snapshot is not None:
            await asyncio.to_thread(self._data_folder.remove, snapshot)
        return True

    async def fail_creation(self, operation: ReadyOperation, error: WeftError) -> None:
        """Record that the run was never made, and fail the operations that wait for it."""
        run_id = RunId(operation.lane)
        async with self._database.write() as transaction:
            await set_run_state(transaction, operation.tenant, run_id, RunState.FAILED)
            await tell_failed_run(transaction, operation.tenant, run_id, error, self._clock())
            await self._complete(transaction, operation, error)
            consequence = RunUnloaded(f"model {run_id} was never made: {error.message}")
            await self._ledger.fail_pending(transaction, run_id, consequence)

    async def _check_path_free(self, operation: ReadyOperation, path: CheckpointPath) -> None:
        """Raise ``InvalidRequest`` before any file is written, if it is clear already."""
        async with self._database.read() as session:
            await _check_free(session, operation.tenant, path)

    async def _write(
        self, operation: ReadyOperation, write: Callable[[Path, AdapterState], int]
    ) -> tuple[CheckpointId, int]:
        checkpoint = new_checkpoint_id()
        directory = self._data_folder.path(directory_of(checkpoint))
        state = self._engine.trainer.state(RunId(operation.lane))
        async with self._residency.files.place_of(operation.tenant):
            self._engine.in_hand.begin(operation.id)
            return checkpoint, await asyncio.to_thread(write, directory, state)

    def _with_optimizer(self, directory: Path, state: AdapterState) -> int:
        return write_checkpoint(directory, self._engine.trainer.base, state, optimizer=True)

    def _weights_alone(self, directory: Path, state: AdapterState) -> int:
        return write_checkpoint(directory, self._engine.trainer.base, state, optimizer=False)

    async def _complete(
        self, transaction: AsyncSession, operation: ReadyOperation, outcome: Result | WeftError
    ) -> None:
        await self._ledger.complete(transaction, [Completion(operation, outcome)], anew=True)


async def _check_free(session: AsyncSession, tenant: TenantId, path: CheckpointPath) -> None:
    """Raise ``InvalidRequest`` if the run has this checkpoint. Exact in a transaction that holds ``Counted.STORAGE``."""
    if await is_path_taken(session, tenant, path):
        raise InvalidRequest(f"path: this run has a checkpoint {path.segment}/{path.name} already; choose another name")
