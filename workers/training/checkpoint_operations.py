"""Operations on whole adapters: create, save, load, unload. Each does its work, then writes its outcome in one transaction.

They run beside the passes of other runs: files are read and written by other threads, the compute thread only swaps states.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, RunUnloaded, Unavailable, WeftError
from contracts.ids import CheckpointId, RunId, SessionId
from contracts.ledger_records import Completion, ReadyOperation
from contracts.operations import (
    LoadWeights,
    ModelCreated,
    ModelUnloaded,
    Result,
    SamplerWeightsSaved,
    SaveWeights,
    SaveWeightsForSampler,
    WeightsLoaded,
    WeightsSaved,
)
from contracts.paths import CheckpointPath, Segment
from engine.training.checkpoint_files import write_checkpoint
from engine.training.trainer import Trainer
from ledger.ledger import Ledger
from ledger.publication import Publication
from store.clock import Clock
from store.data_folder import DataFolder
from store.database import Database
from store.tables import Checkpoint, Run, RunState
from telemetry.training import TrainingTelemetry
from tenants.checkpoints import NewCheckpoint, directory_of, new_checkpoint_id, record_checkpoint
from tenants.runs import get_run, lora_settings
from tenants.samplers import NewSampler, create_sampler, publish_live
from workers.training.residency import AdapterResidency


@dataclass(frozen=True, slots=True)
class CheckpointOperations:
    """Runs operations on whole adapters; every method writes its own completion and raises ``WeftError`` if it cannot."""

    trainer: Trainer
    database: Database
    ledger: Ledger
    data_folder: DataFolder
    clock: Clock
    residency: AdapterResidency
    publication: Publication
    telemetry: TrainingTelemetry

    async def create(self, operation: ReadyOperation) -> None:
        """Make the adapter with its recorded settings."""
        async with self.database.read() as session:
            run = await get_run(session, operation.tenant, operation.lane)
        await self.residency.create(operation, lora_settings(run))
        async with self.database.write() as transaction:
            await self._set_state(transaction, operation, RunState.READY)
            await self._complete(transaction, operation, ModelCreated(model_id=run.id))

    async def load(self, operation: ReadyOperation, load: LoadWeights) -> None:
        """Load a training checkpoint, into a new adapter when ``load.creates``."""
        await self.residency.load(operation, load)
        async with self.database.write() as transaction:
            if load.creates:
                await self._set_state(transaction, operation, RunState.READY)
            await self._complete(transaction, operation, WeightsLoaded(path=load.path, model_id=operation.lane))

    async def save(self, operation: ReadyOperation, save: SaveWeights) -> None:
        """Write a training checkpoint: weights and optimiser state."""
        await self._check_name_free(operation, Segment.WEIGHTS, save.name, overwrite=save.overwrite)
        checkpoint, size = await self._write(operation, optimizer=True)
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
        path = CheckpointPath(operation.lane, Segment.WEIGHTS, save.name)
        async with self.database.write() as transaction:
            replaced = await record_checkpoint(transaction, operation.tenant, new, self.clock)
            await self._complete(transaction, operation, WeightsSaved(path=str(path)))
        if replaced is not None:
            await asyncio.to_thread(self.data_folder.remove, replaced)

    async def save_for_sampler(self, operation: ReadyOperation, save: SaveWeightsForSampler) -> None:
        """Publish an immutable version for sampling; nameless ones come with their own sampler."""
        if save.name is not None:
            await self._check_name_free(operation, Segment.SAMPLER_WEIGHTS, save.name, overwrite=False)
        checkpoint, size = await self._write(operation, optimizer=False)
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
        try:
            if is_followed:
                await self.publication.prepare(self.trainer.base.facts.name, new.run_id, checkpoint)
            async with self.database.write() as transaction:
                await record_checkpoint(transaction, operation.tenant, new, self.clock)
                if save.name is not None:
                    result = SamplerWeightsSaved(path=str(path))
                else:
                    result = await self._open_sampler(transaction, operation, save, checkpoint, path)
                await self._complete(transaction, operation, result)
        except Unavailable:
            # It may have been recorded all the same: the folder is removed with others that no row names.
            raise
        except WeftError:
            await asyncio.to_thread(self.data_folder.remove, directory_of(checkpoint))
            raise
        if is_followed:
            self.telemetry.published(operation, seconds=perf_counter() - started)

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
        sampler_id = await create_sampler(transaction, operation.tenant, sampler, self.clock)
        if is_live:
            await publish_live(transaction, operation.tenant, RunId(run.id), checkpoint, self.clock)
            self.ledger.announce_versions(transaction, run.base_model)
        return SamplerWeightsSaved(sampling_session_id=sampler_id)

    async def unload(self, operation: ReadyOperation) -> None:
        """Drop the adapter for good; what still waits in its lane fails."""
        run_id = RunId(operation.lane)
        async with self.database.write() as transaction:
            snapshot = await transaction.scalar(select(Run.snapshot_dir).where(Run.id == run_id))
            await self._set_state(transaction, operation, RunState.UNLOADED)
            await self.ledger.fail_pending(transaction, run_id, RunUnloaded(f"model {run_id} was unloaded"))
            await self._complete(transaction, operation, ModelUnloaded(model_id=run_id))
        self.residency.forget(run_id)
        if snapshot is not None:
            await asyncio.to_thread(self.data_folder.remove, snapshot)

    async def fail_creation(self, operation: ReadyOperation, error: WeftError) -> None:
        """Record that the run was never made, and fail everything that counted on it."""
        run_id = RunId(operation.lane)
        async with self.database.write() as transaction:
            await self._set_state(transaction, operation, RunState.FAILED)
            await self._complete(transaction, operation, error)
            consequence = RunUnloaded(f"model {run_id} was never made: {error.message}")
            await self.ledger.fail_pending(transaction, run_id, consequence)

    async def _check_name_free(
        self, operation: ReadyOperation, segment: Segment, name: str, *, overwrite: bool
    ) -> None:
        if overwrite:
            return
        async with self.database.read() as session:
            taken = await session.scalar(
                select(Checkpoint.id).where(
                    Checkpoint.tenant_id == operation.tenant,
                    Checkpoint.run_id == operation.lane,
                    Checkpoint.segment == segment,
                    Checkpoint.name == name,
                )
            )
        if taken is not None:
            raise InvalidRequest(f"path: this run has a checkpoint {segment}/{name} already; choose another name")

    async def _write(self, operation: ReadyOperation, *, optimizer: bool) -> tuple[CheckpointId, int]:
        checkpoint = new_checkpoint_id()
        directory = self.data_folder.path(directory_of(checkpoint))
        state = self.trainer.state(RunId(operation.lane))
        size = await asyncio.to_thread(
            partial(write_checkpoint, directory, self.trainer.base, state, optimizer=optimizer)
        )
        return checkpoint, size

    async def _set_state(self, transaction: AsyncSession, operation: ReadyOperation, state: RunState) -> None:
        await transaction.execute(
            update(Run).where(Run.id == operation.lane, Run.tenant_id == operation.tenant).values(state=state)
        )

    async def _complete(
        self, transaction: AsyncSession, operation: ReadyOperation, outcome: Result | WeftError
    ) -> None:
        await self.ledger.complete(transaction, [Completion(operation, outcome)])
