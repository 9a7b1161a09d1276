"""Points of runs' curves, gathered from the operations that a transaction completes and written in it.

A point belongs to one optimizer step: its summands are the ``forward_backward`` that ended since the step before. A replay
completes nothing, so no point has an operation twice.
"""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ledger_records import Completion
from contracts.operations import ForwardBackwardOutput, OperationKind, OptimStep, OptimStepped, TrainingBatch
from ledger.wakeups import Wakeups, run_steps_topic
from tenants.run_points import PointPart, add_parts


class GatheredPoints:
    """Parts of points, by run and step. ``steps``: optimizer steps that each run has taken before the transaction."""

    def __init__(self, steps: Mapping[str, int]) -> None:
        self._steps = steps
        self._parts: dict[tuple[str, int], PointPart] = {}
        self.steps_taken: dict[str, int] = {}
        """Number of new optimizer steps of each run."""

    def add(self, completion: Completion, now: datetime) -> None:
        """Add a completed operation. A run's completions come in the order of their seq_ids."""
        operation, outcome = completion.operation, completion.outcome
        payload = operation.payload
        if operation.kind is OperationKind.FORWARD_BACKWARD:
            if isinstance(outcome, ForwardBackwardOutput) and isinstance(payload, TrainingBatch):
                self._part(completion).add_pass(payload.loss.name, outcome.metrics)
        elif isinstance(outcome, OptimStepped) and isinstance(payload, OptimStep):
            self._part(completion).end(now, payload.learning_rate, outcome.metrics)
            self.steps_taken[operation.lane] = self.steps_taken.get(operation.lane, 0) + 1

    async def write(self, transaction: AsyncSession, wakeups: Wakeups) -> None:
        """Add the parts to the runs' points, and wake up those who watch the runs' steps after the commit."""
        for run in self.steps_taken:
            wakeups.announce_after_commit(transaction, run_steps_topic(run))
        if self._parts:
            await add_parts(transaction, [part for _, part in sorted(self._parts.items())])

    def _part(self, completion: Completion) -> PointPart:
        run = completion.operation.lane
        step = self._steps.get(run, 0) + self.steps_taken.get(run, 0) + 1
        return self._parts.setdefault((run, step), PointPart(run, step, completion.operation.tenant))
