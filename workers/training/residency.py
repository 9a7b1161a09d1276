"""Which adapters are in the trainer's memory, and how they come back: durable snapshot + replay.

Invariant: what the trainer holds for a run equals the effect of every ``done`` operation of its lane. Whenever that is in
doubt (a completion could not be written), the adapter is forgotten and rebuilt from the ledger.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from sqlalchemy import select, update

from engine.contracts.errors import EngineFailure, NotFound, RunUnloaded, WeftError
from engine.contracts.ids import RunId, TenantId
from engine.contracts.operations import LoadWeights, OperationKind, OptimStep, TrainingBatch
from engine.contracts.paths import Segment, parse_path
from engine.training.trainer import PassItem, Trainer
from tenants.checkpoints import SNAPSHOTS, find_checkpoint, new_checkpoint_id
from tenants.clock import Clock
from tenants.data_folder import DataFolder
from tenants.database import Database
from tenants.models import Run, RunState, Session
from tenants.runs import get_run, lora_settings
from workers.compute import ComputeThread
from workers.ledger.ledger import Ledger
from workers.ledger.operations import ReadyOperation

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """How far a resident adapter is: last operation applied, last one its snapshot covers."""

    tenant: TenantId
    applied_seq_id: int
    snapshot_seq_id: int


class AdapterResidency:
    """Brings adapters in, snapshots them, lets them go."""

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
    ) -> None:
        self._trainer = trainer
        self._compute = compute
        self._database = database
        self._ledger = ledger
        self._data_folder = data_folder
        self._clock = clock
        self._snapshot_operations = snapshot_operations
        self._progress: dict[RunId, _Progress] = {}

    async def ensure(self, operation: ReadyOperation) -> None:
        """Have the operation's adapter in memory. Raises ``WeftError`` when it cannot be rebuilt."""
        run_id = RunId(operation.lane)
        if run_id in self._progress:
            return
        async with self._database.read() as session:
            run = await get_run(session, operation.tenant, run_id)
            if run.state in (RunState.UNLOADED, RunState.FAILED):
                raise RunUnloaded(f"model {run_id} was unloaded, or never made")
            replay = await self._ledger.operations_to_replay(
                session, run_id, after_seq_id=run.snapshot_seq_id, before_seq_id=run.next_seq_id
            )
        await self._restore(run, replay)

    async def _restore(self, run: Run, replay: list[ReadyOperation]) -> None:
        run_id, tenant = RunId(run.id), TenantId(run.tenant_id)
        if replay or run.snapshot_dir is not None:
            log.info("restoring run=%s snapshot_seq=%d replay=%d", run.id, run.snapshot_seq_id, len(replay))
        try:
            if run.snapshot_dir is not None:
                directory = self._data_folder.path(run.snapshot_dir)
                await self._compute.run(
                    partial(self._trainer.create_from, run_id, directory, optimizer=True, gradients=True)
                )
            for operation in replay:
                await self._apply_again(run, operation)
        except WeftError:
            await self.forget(run_id)
            raise
        self._progress[run_id] = _Progress(tenant, run.next_seq_id - 1, run.snapshot_seq_id)

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
                await self.load(operation, load)
            case _ if operation.kind is OperationKind.CREATE_MODEL:
                await self._compute.run(partial(self._trainer.create, run_id, lora_settings(run)))

    async def load(self, operation: ReadyOperation, load: LoadWeights) -> None:
        """Put a training checkpoint into the operation's adapter, making it if ``load.creates``. Raises ``WeftError``."""
        path = parse_path(load.path, segment=Segment.WEIGHTS)
        async with self._database.read() as session:
            checkpoint, source = await find_checkpoint(session, operation.tenant, path, self._clock)
            run = await get_run(session, operation.tenant, operation.lane)
        if source.base_model != run.base_model:
            raise NotFound(f"checkpoint {path} is of base model {source.base_model}, this model's is {run.base_model}")
        run_id, directory = RunId(operation.lane), self._data_folder.path(checkpoint.directory)
        apply = self._trainer.create_from if load.creates else self._trainer.load
        await self._compute.run(partial(apply, run_id, directory, optimizer=load.optimizer))

    def created(self, operation: ReadyOperation) -> None:
        """Note a new adapter: its creation is done and written."""
        self._progress[RunId(operation.lane)] = _Progress(operation.tenant, operation.seq_id, -1)

    def applied(self, operation: ReadyOperation) -> None:
        """Note that the operation's effect is in memory and its completion is written."""
        progress = self._progress.get(RunId(operation.lane))
        if progress is not None:
            progress.applied_seq_id = operation.seq_id

    async def forget(self, run_id: RunId) -> None:
        """Drop the adapter from memory; its next operation rebuilds it."""
        self._progress.pop(run_id, None)
        await self._compute.run(partial(self._trainer.unload, run_id))

    async def snapshot_if_due(self, run_id: RunId) -> None:
        """Snapshot the run once enough operations came after its last snapshot."""
        progress = self._progress.get(run_id)
        if progress and progress.applied_seq_id - progress.snapshot_seq_id >= self._snapshot_operations:
            await self.snapshot(run_id)

    async def snapshot(self, run_id: RunId) -> None:
        """Write the run's whole training state durably, if anything came after its last snapshot."""
        progress = self._progress.get(run_id)
        if progress is None or progress.applied_seq_id <= progress.snapshot_seq_id:
            return
        relative = f"{SNAPSHOTS}/{new_checkpoint_id()}"
        directory = self._data_folder.path(relative)
        await self._compute.run(partial(self._trainer.save, run_id, directory, optimizer=True, gradients=True))
        async with self._database.write() as transaction:
            previous = await transaction.scalar(select(Run.snapshot_dir).where(Run.id == run_id))
            await transaction.execute(
                update(Run)
                .where(Run.id == run_id, Run.tenant_id == progress.tenant)
                .values(snapshot_seq_id=progress.applied_seq_id, snapshot_dir=relative)
            )
        progress.snapshot_seq_id = progress.applied_seq_id
        if previous is not None:
            await asyncio.to_thread(self._data_folder.remove, previous)

    async def snapshot_all(self) -> None:
        """Snapshot every resident run: an orderly end replays nothing at the next start."""
        for run_id in list(self._progress):
            await self.snapshot(run_id)

    async def release_ended_sessions(self) -> None:
        """Snapshot and let go of adapters whose session is over; nobody can train them any more."""
        if not self._progress:
            return
        async with self._database.read() as session:
            ended = await session.scalars(
                select(Run.id)
                .join(Session, Session.id == Run.session_id)
                .where(Run.id.in_(list(self._progress)), Session.ended_at.is_not(None))
            )
            run_ids = [RunId(run_id) for run_id in ended]
        for run_id in run_ids:
            await self.snapshot(run_id)
            await self.forget(run_id)
