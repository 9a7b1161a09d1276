"""The trainer's loop: ready operations in, fused passes through the engine, outcomes into the ledger.

One worker per base model and process. Invariants: an operation's effect is applied in memory before its completion is
written, and if writing fails the adapter is forgotten and rebuilt, so nothing is applied twice; an operation that fails
fails alone.
"""

import logging
from collections.abc import Sequence
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from engine.contracts.errors import EngineFailure, RunUnloaded, WeftError
from engine.contracts.ids import RunId
from engine.contracts.operations import (
    LoadWeights,
    OperationKind,
    OptimStep,
    Result,
    SaveWeights,
    SaveWeightsForSampler,
    TrainingBatch,
)
from engine.training.trainer import PassItem, Trainer
from tenants.database import Database
from workers.compute import ComputeThread
from workers.ledger.ledger import Ledger
from workers.ledger.operations import Completion, ReadyOperation
from workers.ledger.wakeups import Wakeups, training_topic, wait_for
from workers.training.checkpoint_operations import CheckpointOperations
from workers.training.residency import AdapterResidency

log = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
"""Longest time without a look at the ledger: the net below lost wake-ups."""

_PASS_KINDS = frozenset({OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD})


class TrainingWorker:
    """Runs every training operation of one base model."""

    def __init__(
        self,
        *,
        base_model: str,
        trainer: Trainer,
        compute: ComputeThread,
        database: Database,
        ledger: Ledger,
        wakeups: Wakeups,
        residency: AdapterResidency,
        checkpoints: CheckpointOperations,
    ) -> None:
        self._base_model = base_model
        self._trainer = trainer
        self._compute = compute
        self._database = database
        self._ledger = ledger
        self._wakeups = wakeups
        self._residency = residency
        self._checkpoints = checkpoints
        self._stopping = False

    async def run(self) -> None:
        """Work until ``stop``; then snapshot what is in memory."""
        topic = training_topic(self._base_model)
        with self._wakeups.listen(topic) as event:
            while not self._stopping:
                event.clear()
                if await self._guarded_round() or self._stopping:
                    continue
                if not await wait_for(event, SWEEP_SECONDS):
                    await self._guarded_sweep()
        await self._residency.snapshot_all()

    def stop(self) -> None:
        """Finish the pass in hand, then end."""
        self._stopping = True
        self._wakeups.announce(training_topic(self._base_model))

    async def _guarded_round(self) -> bool:
        try:
            return await self._round()
        except Exception:
            log.exception("training round failed base=%s; trying again after a pause", self._base_model)
            return False

    async def _guarded_sweep(self) -> None:
        try:
            await self._residency.release_ended_sessions()
        except Exception:
            log.exception("sweep failed base=%s; the next one tries again", self._base_model)

    async def _round(self) -> bool:
        """Run the head of every run that has one; says whether there was any."""
        async with self._database.read() as session:
            heads = await self._ledger.ready_training(session, self._base_model)
        if not heads:
            return False
        heads = await self._resident(heads)
        await self._run_passes([head for head in heads if head.kind in _PASS_KINDS])
        await self._run_steps([head for head in heads if head.kind is OperationKind.OPTIM_STEP])
        for head in heads:
            if head.kind not in _PASS_KINDS and head.kind is not OperationKind.OPTIM_STEP:
                await self._run_alone(head)
        for head in heads:
            await self._residency.snapshot_if_due(RunId(head.lane))
        return True

    async def _resident(self, heads: Sequence[ReadyOperation]) -> list[ReadyOperation]:
        """Bring the adapters in; an operation whose adapter cannot be rebuilt fails here."""
        present = []
        for head in heads:
            try:
                if not _creates(head) and head.kind is not OperationKind.UNLOAD_MODEL:
                    await self._residency.ensure(head)
                present.append(head)
            except RunUnloaded as error:
                # Accepted just before the unload was written.
                await self._write([Completion(head, error)])
            except WeftError as error:
                log.error("run=%s could not be restored: %s", head.lane, error.message)
                failure = EngineFailure("this model's training state could not be restored; load a checkpoint instead")
                await self._write([Completion(head, failure)])
        return present

    async def _run_passes(self, heads: Sequence[ReadyOperation]) -> None:
        items: list[PassItem] = []
        for head in heads:
            if not isinstance(head.payload, TrainingBatch):
                raise TypeError(f"{head.kind} without a batch")
            backward = head.kind is OperationKind.FORWARD_BACKWARD
            items.append(PassItem(run=RunId(head.lane), batch=head.payload, backward=backward))
        if not items:
            return
        outcomes: Sequence[Result | WeftError]
        try:
            outcomes = await self._compute.run(partial(self._trainer.run_pass, items))
        except Exception:
            log.exception("fused pass failed base=%s operations=%d", self._base_model, len(items))
            outcomes = [_failure(head) for head in heads]
        await self._write([Completion(head, outcome) for head, outcome in zip(heads, outcomes, strict=True)])

    async def _run_steps(self, heads: Sequence[ReadyOperation]) -> None:
        steps = [(RunId(head.lane), head.payload) for head in heads if isinstance(head.payload, OptimStep)]
        if not steps:
            return
        outcomes: Sequence[Result | WeftError]
        try:
            outcomes = await self._compute.run(partial(self._trainer.optim_steps, steps))
        except Exception:
            log.exception("optimizer step failed base=%s operations=%d", self._base_model, len(steps))
            outcomes = [_failure(head) for head in heads]
        await self._write([Completion(head, outcome) for head, outcome in zip(heads, outcomes, strict=True)])

    async def _run_alone(self, head: ReadyOperation) -> None:
        """Run an operation on a whole adapter; it writes its own completion."""
        try:
            await self._dispatch(head)
        except WeftError as error:
            await self._fail_alone(head, error)
        except SQLAlchemyError:
            await self._residency.forget(RunId(head.lane))
            raise
        except Exception:
            log.exception("operation=%s kind=%s failed", head.id, head.kind)
            await self._residency.forget(RunId(head.lane))
            await self._fail_alone(head, _failure(head))
        else:
            if _creates(head):
                self._residency.created(head)
            elif head.kind is not OperationKind.UNLOAD_MODEL:
                self._residency.applied(head)
            if head.kind in (OperationKind.SAVE_WEIGHTS, OperationKind.LOAD_WEIGHTS):
                await self._residency.snapshot(RunId(head.lane))

    async def _dispatch(self, head: ReadyOperation) -> None:
        match head.payload:
            case SaveWeights() as save:
                await self._checkpoints.save(head, save)
            case SaveWeightsForSampler() as save:
                await self._checkpoints.save_for_sampler(head, save)
            case LoadWeights() as load:
                await self._checkpoints.load(head, load)
            case _ if head.kind is OperationKind.CREATE_MODEL:
                await self._checkpoints.create(head)
            case _ if head.kind is OperationKind.UNLOAD_MODEL:
                await self._checkpoints.unload(head)
            case _:
                raise TypeError(f"no handler for {head.kind}")

    async def _fail_alone(self, head: ReadyOperation, error: WeftError) -> None:
        if _creates(head):
            await self._checkpoints.fail_creation(head, error)
        else:
            await self._write([Completion(head, error)])

    async def _write(self, completions: Sequence[Completion]) -> None:
        """Write completions in one transaction; if that fails, memory and ledger disagree and memory gives way."""
        try:
            async with self._database.write() as transaction:
                await self._ledger.complete(transaction, completions)
        except Exception:
            for completion in completions:
                await self._residency.forget(RunId(completion.operation.lane))
            raise
        for completion in completions:
            self._residency.applied(completion.operation)


def _creates(head: ReadyOperation) -> bool:
    return head.kind is OperationKind.CREATE_MODEL or (isinstance(head.payload, LoadWeights) and head.payload.creates)


def _failure(head: ReadyOperation) -> EngineFailure:
    return EngineFailure(f"weft failed to run this {head.kind}; the service's log has the cause (request {head.id})")
