"""Puts an adapter's training state into the trainer's memory: a fresh state, a checkpoint's, or the run's own earlier state.

A run's own state is rebuilt: the run's newest snapshot is read from disk, then the operations after the snapshot are applied
again, in order of seq_id.
"""

import asyncio
import logging
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter
from weakref import WeakValueDictionary

from contracts.errors import EngineFailure, LeaseLost, NotFound, PoisonOperation, RunUnloaded, Unavailable, WeftError
from contracts.ids import CheckpointId, RunId
from contracts.ledger_records import ReadyOperation, RunLease, lease_of
from contracts.operations import (
    ForwardBackwardOutput,
    LoadWeights,
    LoraSettings,
    OperationKind,
    OptimStep,
    TrainingBatch,
    Unreadable,
)
from contracts.paths import Segment, parse_path
from engine.training.adapter_state import AdapterState, read_state
from engine.training.checkpoint_files import read_checkpoint
from engine.training.pass_operation import PassOperation
from engine.training.trainer import fresh_state, loaded_state
from ledger.runtime import Runtime
from store.tables import Run, RunState
from tenants.checkpoint_holds import held_checkpoint
from tenants.checkpoints import directory_of, find_checkpoint
from tenants.run_history import RunEventKind, note_run_events, was_restored
from tenants.runs import get_run, lora_settings
from workers.training.training_engine import TrainingEngine

log = logging.getLogger(__name__)


MAX_REPLAYS_AT_ONCE = 2
"""Runs that are replayed at the same time. So a step of a run in memory waits for two replayed passes at most.

With two, one computes while the other's payloads are read.
"""
_READ_AT_ONCE = 4
"""Operations of a replay whose payloads are in memory at the same time."""
_WITHOUT_EFFECT = (OperationKind.FORWARD, OperationKind.SAVE_WEIGHTS, OperationKind.SAVE_WEIGHTS_FOR_SAMPLER)


@dataclass(frozen=True, slots=True)
class RestoredAdapter:
    """A rebuilt state, the last operation that the state covers, and the last one that the run's snapshot covers."""

    state: AdapterState
    applied_seq_id: int
    snapshot_seq_id: int


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A training checkpoint's state."""

    id: CheckpointId
    state: AdapterState


class AdapterRestorer:
    """Makes adapters' states and puts them into one base model's trainer."""

    def __init__(self, runtime: Runtime, engine: TrainingEngine, files: asyncio.Semaphore) -> None:
        """Take ``files`` as the limit of adapters read or written at the same time."""
        self._database = runtime.database
        self._ledger = runtime.ledger
        self._data_folder = runtime.data_folder
        self._clock = runtime.clock
        self._trainer = engine.trainer
        self._compute = engine.compute
        self._pass_token_budget = engine.pass_token_budget
        self._tenant_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._telemetry = engine.telemetry
        self._files = files
        self._replays = asyncio.Semaphore(MAX_REPLAYS_AT_ONCE)
        self._in_hand = engine.in_hand
        self._most_attempts = runtime.settings.max_attempts

    async def restore(self, operation: ReadyOperation) -> RestoredAdapter:
        """Rebuild the state of the operation's run.

        Raises ``WeftError``. Part of the state may be in the trainer's memory then.
        """
        run_id = RunId(operation.lane)
        async with self._database.read() as session:
            run = await get_run(session, operation.tenant, run_id)
            if run.state in (RunState.UNLOADED, RunState.FAILED):
                raise RunUnloaded(f"model {run_id} was unloaded, or never made")
            if RunLease(run.trainer_id or "", run.lease_token) != lease_of(operation):
                raise LeaseLost(f"model {run_id} is trained elsewhere by now")
            is_told = await was_restored(session, run_id, run.lease_token)
        started = perf_counter()
        log.debug("restoring run=%s snapshot_seq=%d next_seq=%d", run.id, run.snapshot_seq_id, run.next_seq_id)
        await self._put_snapshot(run)
        replayed = await self._replay(run) if run.snapshot_seq_id < run.next_seq_id - 1 else 0
        state = await self._compute.run(partial(self._trainer.state, run_id))
        self._telemetry.restored(replayed=replayed, seconds=perf_counter() - started)
        if replayed or not is_told:
            await self._note(run, replayed)
        return RestoredAdapter(state, run.next_seq_id - 1, run.snapshot_seq_id)

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

    async def put_fresh(self, run: RunId, settings: LoraSettings) -> AdapterState:
        """Put a fresh adapter into the trainer and return its state. Raises ``InvalidRequest``."""
        async with self._files:
            state = await asyncio.to_thread(fresh_state, self._trainer.base, settings)
        await self._compute.run(partial(self._trainer.put, run, state))
        return state

    async def read_checkpoint(self, operation: ReadyOperation, load: LoadWeights) -> LoadedCheckpoint:
        """Return the state that the operation's adapter is to get from a training checkpoint. Raises ``WeftError``.

        The checkpoint is the one that was recorded for the operation, whatever its name stands for by now.
        """
        path = parse_path(load.path, segment=Segment.WEIGHTS)
        async with self._database.read() as session:
            checkpoint = await held_checkpoint(session, operation.tenant, operation.id)
            if checkpoint is None:
                found_now, source = await find_checkpoint(session, operation.tenant, path, self._clock)
                run = await get_run(session, operation.tenant, operation.lane)
                if source.base_model != run.base_model:
                    raise NotFound(
                        f"checkpoint {path} is of base model {source.base_model}, this model's is {run.base_model}"
                    )
                checkpoint = CheckpointId(found_now.id)
        run_id, directory = RunId(operation.lane), self._data_folder.path(directory_of(checkpoint))
        async with self._files:
            found = await asyncio.to_thread(
                partial(read_checkpoint, directory, self._trainer.base, optimizer=load.optimizer)
            )
        if not load.creates:
            found = loaded_state(self._trainer.state(run_id), found)
        return LoadedCheckpoint(checkpoint, found)

    async def _put_snapshot(self, run: Run) -> None:
        if run.snapshot_dir is not None:
            directory = self._data_folder.path(run.snapshot_dir)
            async with self._files:
                state = await asyncio.to_thread(read_state, directory, self._trainer.base)
            await self._compute.run(partial(self._trainer.put, RunId(run.id), state))

    async def _replay(self, run: Run) -> int:
        """Apply the operations after the run's snapshot again; return how many. Few runs do so at a time.

        The payloads are read a few at a time, when their turn has come.
        """
        replayed, reached = 0, run.snapshot_seq_id
        # One run of a tenant at a time, so that a tenant with many runs does not stand before the others.
        turn = self._tenant_turns.setdefault(run.tenant_id, asyncio.Lock())
        async with turn, self._replays:
            while True:
                async with self._database.read() as session:
                    some = await self._ledger.operations_to_replay(
                        session, RunId(run.id), after_seq_id=reached, before_seq_id=run.next_seq_id, most=_READ_AT_ONCE
                    )
                for operation in some:
                    await self._apply_again(run, operation)
                    reached = operation.seq_id
                replayed += len(some)
                if len(some) < _READ_AT_ONCE:
                    return replayed

    async def _pass_again(self, operation: PassOperation) -> ForwardBackwardOutput | WeftError:
        """Compute the operation in pieces of a pass's tokens, as at first: other runs' passes go between them."""
        while operation.outcome is None and (lengths := operation.lengths_left):
            tokens = list(accumulate(lengths))
            sequences = max(1, bisect_right(tokens, self._pass_token_budget))
            await self._compute.run(partial(self._trainer.advance, [operation.next_piece(sequences)]))
        return operation.outcome or EngineFailure("the pass left out a sequence")

    async def _apply_again(self, run: Run, operation: ReadyOperation) -> None:
        if operation.attempts >= self._most_attempts:
            raise PoisonOperation(f"{operation.attempts} trainers ended at operation {operation.seq_id}, also later")
        with self._in_hand.holding([operation.id]):
            await self._apply(run, operation)

    async def _apply(self, run: Run, operation: ReadyOperation) -> None:
        run_id = RunId(run.id)
        match operation.payload:
            case TrainingBatch() as batch if operation.kind is OperationKind.FORWARD_BACKWARD:
                outcome = await self._pass_again(PassOperation(run_id, batch, backward=True))
                if isinstance(outcome, WeftError):
                    raise EngineFailure(f"replay of operation {operation.seq_id} failed: {outcome.message}")
            case OptimStep() as step:
                await self._compute.run(partial(self._trainer.optim_step, run_id, step))
            case LoadWeights() as load:
                loaded = await self.read_checkpoint(operation, load)
                await self._compute.run(partial(self._trainer.put, run_id, loaded.state))
            case _ if operation.kind is OperationKind.CREATE_MODEL:
                await self.put_fresh(run_id, lora_settings(run))
            case Unreadable() as payload if operation.kind not in _WITHOUT_EFFECT:
                raise EngineFailure(f"replay needs operation {operation.seq_id}, a {operation.kind}: {payload.reason}")
