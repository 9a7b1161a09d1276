"""Fused passes under way: as many at once as the trainer has slots, each planned when its slot is free.

A slot that ends goes on with the next pass at once; what came of the last one is noted meanwhile. While more waits than
the free slots hold, a pass takes one slot; the last of what waits is cut for all of them. Called from the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from contracts.errors import WeftError
from contracts.ledger_records import ReadyOperation
from contracts.operations import OperationKind, Result, TrainingBatch
from contracts.pass_report import PassReport
from engine.training.pass_operation import PassOperation, PassPiece
from engine.training.trainer import ComputedPass, Trainer
from telemetry.training import TrainingTelemetry
from workers.compute_thread import ComputeThread
from workers.training.adapter_tasks import failure_of
from workers.training.lanes import Lane, Lanes
from workers.training.residency import AdapterResidency
from workers.training.scheduler import Fairness, QueuedPass, parts_by_length, plan_pass
from workers.training.statistics import TrainingStatistics

log = logging.getLogger(__name__)

_HEADROOM = 8
"""A pass may hold this part of its token budget more: light work beside a full pass then pushes out no long sequence, which
would leave cores without their share of it."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """An operation and its piece of the pass."""

    lane: Lane
    operation: ReadyOperation
    piece: PassPiece


@dataclass(frozen=True, slots=True)
class _Part:
    """What is computed together. ``is_last``: nothing waited after it when it was planned."""

    chosen: list[_Chosen]
    is_last: bool

    @property
    def tokens(self) -> int:
        """Positions to compute, without padding."""
        return sum(
            len(datum.tokens)
            for chosen in self.chosen
            for datum in chosen.piece.operation.batch.data[chosen.piece.first :][: chosen.piece.sequences]
        )


class FusedPasses:
    """Plans the passes of one base model's lanes and has them computed."""

    def __init__(
        self,
        *,
        base_model: str,
        trainer: Trainer,
        compute: ComputeThread,
        lanes: Lanes,
        residency: AdapterResidency,
        statistics: TrainingStatistics,
        telemetry: TrainingTelemetry,
        token_budget: int,
        complete: Callable[[Lane, ReadyOperation, Result | WeftError], None],
        ended: Callable[[], None],
    ) -> None:
        """``token_budget`` is that of all slots; ``complete`` ends an operation, ``ended`` hears that a pass has ended."""
        self._base_model = base_model
        self._trainer = trainer
        self._compute = compute
        self._lanes = lanes
        self._residency = residency
        self._statistics = statistics
        self._telemetry = telemetry
        self._slot_budget = max(1, token_budget // trainer.slots)
        self._complete = complete
        self._ended = ended
        self._fairness = Fairness()
        self._parts: deque[_Part] = deque()
        self._free = trainer.slots
        self._threads = ThreadPoolExecutor(trainer.slots, thread_name_prefix=f"pass-{base_model}")
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._stopping = False

    def begin(self) -> None:
        """Start passes while slots are free and something may run. Raises what has ended a pass, if it was no ``Exception``."""
        if self._failure is not None:
            raise self._failure
        while self._free and not self._stopping:
            if not self._parts:
                self._parts.extend(self._plan())
            if not self._parts:
                return
            slots = self._slots_for(self._parts[0])
            if slots > self._free:
                return
            self._start(self._parts.popleft(), slots)

    async def finished(self) -> None:
        """Begin nothing more, and wait for what is under way."""
        self._stopping = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown()

    # --- planning --------------------------------------------------------------------------------------------------

    def _plan(self) -> list[_Part]:
        """What the scheduler chooses for the next pass, in parts that are computed one after another."""
        in_order = self._may_run()
        found = {operation.id: (lane, operation, begun) for lane, operation, begun in in_order}
        queue = [
            QueuedPass(operation.id, lane.run, lane.tenant, begun.lengths_left) for lane, operation, begun in in_order
        ]
        waiting = sum(sum(queued.lengths) for queued in queue)
        is_last = waiting <= self._free * self._slot_budget
        plan = plan_pass(
            queue,
            self._fairness,
            shares={lane.tenant: lane.share for lane, _, _ in in_order},
            token_budget=self._free * self._slot_budget if is_last else self._most,
        )
        self._fairness = plan.fairness
        parts: list[_Part] = []
        for part in parts_by_length(plan.pieces, queue):
            chosen = []
            for planned in part:
                lane, operation, begun = found[planned.id]
                if planned.id not in lane.started:
                    self._telemetry.taken_up([operation])
                lane.started[planned.id] = begun
                chosen.append(_Chosen(lane, operation, begun.next_piece(planned.sequences)))
            parts.append(_Part(chosen, is_last=False))
        if parts:
            parts[-1] = _Part(parts[-1].chosen, is_last=is_last)
        return parts

    @property
    def _most(self) -> int:
        """Tokens on one slot."""
        return self._slot_budget + self._slot_budget // _HEADROOM

    def _may_run(self) -> list[tuple[Lane, ReadyOperation, PassOperation]]:
        """Operations with sequences in no pass yet, in order of acceptance, but each run's by seq_id: they may have arrived
        the other way round.
        """
        placed: list[tuple[int, tuple[Lane, ReadyOperation, PassOperation]]] = []
        for lane in self._lanes:
            if not lane.is_busy and self._residency.holds(lane.run):
                place = 0
                for operation in lane.passes():
                    place = max(place, operation.position)
                    begun = _begun(lane, operation)
                    if begun.outcome is None and begun.lengths_left:
                        placed.append((place, (lane, operation, begun)))
        placed.sort(key=lambda one: one[0])
        return [one for _, one in placed]

    def _slots_for(self, part: _Part) -> int:
        """All that are free for the last of what waits, and all there are for a sequence that is longer than a slot holds."""
        if part.is_last:
            return self._free
        return self._trainer.slots if part.tokens > self._most else 1

    # --- computing -------------------------------------------------------------------------------------------------

    def _start(self, part: _Part, slots: int) -> None:
        self._free -= slots
        task = asyncio.create_task(self._run(part.chosen, slots), name=f"pass {self._base_model}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
        self._ended()

    async def _run(self, part: Sequence[_Chosen], slots: int) -> None:
        try:
            computed = await self._computed(part, slots)
            # First the next pass: no core waits for what is noted.
            self.begin()
            await self._note(computed, part)
        except Exception:
            log.exception("fused pass failed base=%s operations=%d", self._base_model, len(part))
            for chosen in part:
                if chosen.piece.operation.outcome is None:
                    chosen.piece.operation.end(failure_of(chosen.operation))
        for lane in {chosen.lane.run: chosen.lane for chosen in part}.values():
            self._complete_in_order(lane)

    async def _computed(self, part: Sequence[_Chosen], slots: int) -> ComputedPass:
        pieces = [chosen.piece for chosen in part]
        compute = partial(self._trainer.compute, pieces, slots=slots)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, compute)
        finally:
            self._free += slots

    async def _note(self, computed: ComputedPass, part: Sequence[_Chosen]) -> None:
        lanes = {chosen.lane.run: chosen.lane for chosen in part}.values()
        in_order = [begun for lane in lanes for begun in _started_in_order(lane)]
        await self._compute.run(partial(self._trainer.finish, computed, in_order))
        self._report(computed.report, part)

    def _complete_in_order(self, lane: Lane) -> None:
        for operation in list(lane.passes()):
            begun = lane.started.get(operation.id)
            if begun is None or begun.outcome is None:
                return
            self._complete(lane, operation, begun.outcome)

    def _report(self, report: PassReport, part: Sequence[_Chosen]) -> None:
        tenants = len({chosen.lane.tenant for chosen in part})
        self._statistics.add_pass(report, tenants=tenants)
        self._telemetry.pass_done(report, tenants=tenants, operations=[chosen.operation for chosen in part])
        log.debug(
            "pass base=%s tenants=%d adapters=%d sequences=%d tokens=%d padding=%.3f seconds=%.4f base_s=%.4f "
            "low_rank_s=%.4f loss_s=%.4f",
            self._base_model,
            tenants,
            report.adapters,
            report.sequences,
            report.tokens,
            report.padding_share,
            report.seconds,
            report.base_seconds,
            report.low_rank_seconds,
            report.loss_seconds,
        )


def _begun(lane: Lane, operation: ReadyOperation) -> PassOperation:
    """What is computed of the operation so far."""
    found = lane.started.get(operation.id)
    if found is not None:
        return found
    if not isinstance(operation.payload, TrainingBatch):
        raise TypeError(f"{operation.kind} without a batch")
    return PassOperation(lane.run, operation.payload, operation.kind is OperationKind.FORWARD_BACKWARD)


def _started_in_order(lane: Lane) -> list[PassOperation]:
    """Those of the lane's operations that are in passes, by seq_id."""
    return [lane.started[operation.id] for operation in lane.passes() if operation.id in lane.started]
