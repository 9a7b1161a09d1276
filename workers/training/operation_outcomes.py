"""Records outcomes of training operations: in memory at once, in the ledger soon after.

Invariants: a run's completions reach the ledger strictly by seq_id. A run whose completion cannot be written is dropped
from memory, because its memory would stay ahead of the ledger. The run's next operation rebuilds the run. Nothing is written
of a replay.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import perf_counter

from contracts.errors import EngineFailure, OutOfMemory, StateUnrestored, WeftError
from contracts.ids import RunId
from contracts.ledger_records import Completion, ReadyOperation
from contracts.operations import Result
from engine.model.device import is_lack_of_memory
from workers.training.completion_writer import CompletionWriter
from workers.training.lanes import Lane, Lanes
from workers.training.residency import AdapterResidency
from workers.training.training_engine import TrainingEngine

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
"""Time until the ledger is looked at because of a run that was put aside."""


class OperationOutcomes:
    """Ends the operations of one base model's lanes, and drops runs whose memory and ledger may differ."""

    def __init__(
        self,
        engine: TrainingEngine,
        lanes: Lanes,
        residency: AdapterResidency,
        writer: CompletionWriter,
        *,
        wake: Callable[[], None],
    ) -> None:
        """Call ``wake`` to have the worker look at the ledger again."""
        self._telemetry = engine.telemetry
        self._lanes = lanes
        self._residency = residency
        self._writer = writer
        self._wake = wake

    async def write(self) -> None:
        """Write completions until the writer is closed."""
        await self._writer.run(on_written=self._written, on_refused=self.put_aside)

    def complete(self, lane: Lane, operation: ReadyOperation, outcome: Result | WeftError) -> None:
        """Move the lane past an operation that was computed or has failed, and have its completion written."""
        if lane.is_dropped:
            return
        try:
            self._complete(lane, operation, outcome)
        except Exception:  # the edge of one operation: it may be noted by half, and others are completed after it
            log.exception("run=%s is dropped from memory: operation=%s could not be completed", lane.run, operation.id)
            self.put_aside(lane.run)

    def _complete(self, lane: Lane, operation: ReadyOperation, outcome: Result | WeftError) -> None:
        if operation.is_replay:
            self.complete_replay(lane, operation, outcome if isinstance(outcome, WeftError) else None)
            return
        self._telemetry.finished(operation, outcome, share=lane.share)
        lane.unwritten += 1
        self._writer.put([Completion(operation, outcome)])
        self._finish(lane, operation)

    def complete_replay(self, lane: Lane, replay: ReadyOperation, failure: WeftError | None) -> None:
        """Move the lane past a replay. One that fails takes the adapter along: it cannot be what its run's results say."""
        if lane.is_dropped or (rebuild := lane.rebuild) is None:
            return
        if isinstance(failure, OutOfMemory):
            lane.end_rebuild(out_of_memory(replay))
            self._residency.forget(lane.run)
            return
        if failure is not None:
            cause = f"operation {replay.seq_id} cannot be computed again (request {replay.id})"
            log.error("run=%s could not be restored: %s: %s", lane.run, cause, failure.message)
            lane.end_rebuild(unrestored(cause))
            self._residency.forget(lane.run)
            return
        self._finish(lane, replay)
        if lane.next_seq_id == rebuild.next_seq_id:
            lane.end_rebuild(None)
            self._telemetry.restored(replayed=rebuild.replayed, seconds=perf_counter() - rebuild.began)

    def _finish(self, lane: Lane, operation: ReadyOperation) -> None:
        lane.finish(operation)
        self._residency.applied(lane.run, lane.next_seq_id - 1)
        if not lane.started:
            self._residency.snapshot_if_due(lane.run)

    def drop(self, run: RunId) -> None:
        """Drop the run's lane and adapter from memory. The run is rebuilt from the ledger for its next operation."""
        self._forget(run)
        self._wake()

    def put_aside(self, run: RunId) -> None:
        """Drop the run as ``drop`` does, and look at the ledger after a pause: what has just failed may fail again at once."""
        self._forget(run)
        asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._wake)

    def _forget(self, run: RunId) -> None:
        self._lanes.drop(run)
        self._residency.forget(run)

    def _written(self, completion: Completion) -> None:
        lane = self._lanes.get(RunId(completion.operation.lane))
        if lane is not None and lane.unwritten:
            lane.unwritten -= 1
            if lane.has_hole or lane.is_held:
                self._wake()


def has_failed_whole(outcomes: Sequence[object]) -> bool:
    """Return whether each outcome is a failure of weft's own, which nobody foresaw: the device may be the cause."""
    return bool(outcomes) and all(isinstance(outcome, EngineFailure) for outcome in outcomes)


def unrestored(cause: str) -> StateUnrestored:
    """Return the error that the owner of a run reads whose adapter could not be rebuilt."""
    return StateUnrestored(f"this model's training state could not be restored: {cause}; load a checkpoint instead")


def left_out(operation: ReadyOperation, cause: Exception) -> EngineFailure:
    """Return the error that the operation's owner reads when its adapter could not be brought into memory."""
    if is_lack_of_memory(cause):
        return out_of_memory(operation)
    return EngineFailure(
        "this model's adapter cannot be brought in now; nothing was changed and its state is kept: send the request again, "
        f"or ask the operator (request {operation.id})"
    )


def out_of_memory(operation: ReadyOperation) -> OutOfMemory:
    """Return the error that the owner reads of an operation for whose adapter there is no memory."""
    return OutOfMemory(
        "there is no memory for this model's adapter now; nothing was changed and its state is kept: send the request again, "
        f"or ask the operator (request {operation.id})"
    )


def failure_of(operation: ReadyOperation) -> EngineFailure:
    """Return the error that the operation's owner reads when weft itself failed."""
    return EngineFailure(
        f"weft failed to run this {operation.kind}; the service's log has the cause (request {operation.id})"
    )
