"""Takes the due optimizer steps of all runs in memory as one fused AdamW step."""

import logging
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from contracts.errors import WeftError
from contracts.ledger_records import ReadyOperation
from contracts.operations import OptimStep, Result
from workers.training.lanes import Lane, Lanes
from workers.training.operation_outcomes import OperationOutcomes, failure_of, has_failed_whole
from workers.training.residency import AdapterResidency
from workers.training.training_engine import TrainingEngine
from workers.training.turns import Turns

log = logging.getLogger(__name__)

_Due = tuple[Lane, ReadyOperation, OptimStep]


class OptimizerSteps:
    """Takes the optimizer steps of one base model's lanes."""

    def __init__(
        self,
        engine: TrainingEngine,
        lanes: Lanes,
        residency: AdapterResidency,
        outcomes: OperationOutcomes,
        turns: Turns,
    ) -> None:
        self._engine = engine
        self._lanes = lanes
        self._residency = residency
        self._outcomes = outcomes
        self._turns = turns

    async def take(self) -> bool:
        """Step every resident adapter whose next operation is an optimizer step. Return whether there was one.

        A step is applied and done, or has failed and is not in the adapter. Raises ``DeviceFailed``.
        """
        due = self._due()
        if not due:
            return False
        operations = [operation for _, operation, _ in due]
        telemetry = self._engine.telemetry
        telemetry.claimed(operations)
        started = perf_counter()
        with self._engine.in_hand.holding([operation.id for operation in operations]):
            outcomes = await self._outcomes_of(due)
        seconds = perf_counter() - started
        # At once: a step whose lane stays before it would be taken again.
        for (lane, operation, _), outcome in zip(due, outcomes, strict=True):
            self._outcomes.complete(lane, operation, outcome)
        telemetry.steps_done(operations, seconds=seconds)
        return True

    async def _outcomes_of(self, due: Sequence[_Due]) -> Sequence[Result | WeftError]:
        try:
            steps = [(lane.run, step) for lane, _, step in due]
            outcomes = await self._engine.compute.run(partial(self._engine.trainer.optim_steps, steps))
            if has_failed_whole(outcomes):
                await self._engine.check_device()
        except Exception:
            log.exception("optimizer step failed base=%s operations=%d", self._engine.base_model, len(due))
            await self._engine.check_device()
            # Some may have been applied. Rebuilt from the ledger, no adapter has a step that failed.
            for lane, _, _ in due:
                self._residency.forget(lane.run)
            return [failure_of(operation) for _, operation, _ in due]
        return outcomes

    def _due(self) -> list[_Due]:
        due: list[_Due] = []
        for lane in self._lanes:
            head = lane.head
            if head is None or lane.is_busy or not self._residency.is_at(lane.run, lane.next_seq_id):
                continue
            if isinstance(head.payload, OptimStep) and self._turns.allows(lane):
                due.append((lane, head, head.payload))
        return due
