"""Keeps fused passes running: as many at once as the trainer has slots, each planned when a slot becomes free.

A slot whose pass has ended starts the next pass at once. The results of the ended pass are noted meanwhile. While more
tokens wait than the free slots hold, a pass takes one slot. The last tokens that wait are computed on all free slots at
once. Called from the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from contracts.ids import TenantId
from contracts.ledger_records import ReadyOperation
from contracts.operations import OperationKind, TrainingBatch
from contracts.pass_report import EndedPass, PassReport
from contracts.turn_bounds import least_tokens
from engine.piece_size import PieceSize
from engine.round_robin import Fairness
from engine.training.pass_operation import PassOperation, PassPiece
from engine.training.trainer import ComputedPass
from engine.weighted_order import Tags
from workers.training.lanes import Lane, Lanes
from workers.training.loss_evaluations import LossEvaluations, LossToEvaluate
from workers.training.operation_outcomes import OperationOutcomes, failure_of, has_failed_whole
from workers.training.residency import AdapterResidency
from workers.training.scheduler import QueuedPass, parts_by_length, plan_pass
from workers.training.training_engine import TrainingEngine
from workers.training.turns import Turns

log = logging.getLogger(__name__)

_HEADROOM = 8
"""A pass may exceed its token budget by one part in ``_HEADROOM``. So light work beside a full pass pushes out no long
sequence. Without the long sequence there would be too few micro-batches for the cores."""


_Begun = tuple[Lane, ReadyOperation, PassOperation]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A piece of the pass, with its operation and lane."""

    lane: Lane
    operation: ReadyOperation
    piece: PassPiece


@dataclass(frozen=True, slots=True)
class _Part:
    """Pieces computed in one call of the trainer. ``is_last``: no work waited after the part when it was planned."""

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
    """Plans the passes of one base model's lanes, has them computed and completes their operations."""

    def __init__(
        self,
        engine: TrainingEngine,
        lanes: Lanes,
        residency: AdapterResidency,
        outcomes: OperationOutcomes,
        turns: Turns,
        *,
        size: PieceSize,
        ended: Callable[[], None],
    ) -> None:
        """Call ``ended`` whenever a pass has ended. ``size`` bounds the passes while several tenants have work."""
        trainer = engine.trainer
        self._engine = engine
        self._trainer = trainer
        self._compute = engine.compute
        self._telemetry = engine.telemetry
        self._base_model = engine.base_model
        self._lanes = lanes
        self._residency = residency
        self._outcomes = outcomes
        self._turns = turns
        self._in_hand = engine.in_hand
        self._ended = ended
        self.last: EndedPass | None = None
        """Pass whose results were noted last."""
        self._slot_budget = engine.slot_token_budget
        self._size = size
        self._fairness = Fairness()
        self._tags: Mapping[TenantId, Tags] = {}
        self._parts: deque[_Part] = deque()
        self._free = trainer.slots
        self._threads = ThreadPoolExecutor(trainer.slots, thread_name_prefix=f"pass-{self._base_model}")
        self._losses = LossEvaluations(engine, turns)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._stopping = False

    @property
    def are_under_way(self) -> bool:
        """True while a pass runs or is planned, or a custom loss is evaluated.

        An operation may be between two of its passes, or wait for its loss's turn.
        """
        return bool(self._tasks or self._parts)

    def begin(self) -> None:
        """Start passes while slots are free and something may run, and the evaluation of a custom loss.

        Raises the error that has ended an earlier pass, if it was no ``Exception`` (``GroupLost``).
        """
        if self._failure is not None:
            raise self._failure
        self._begin_loss()
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
        """Begin no more passes and evaluations, and wait for those under way."""
        self._stopping = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown()
        self._losses.close()

    # --- planning --------------------------------------------------------------------------------------------------

    def _plan(self) -> list[_Part]:
        """Return the scheduler's choice for the next pass, in parts that are computed one after another."""
        in_order = self._may_run()
        found = {operation.id: (lane, operation, begun) for lane, operation, begun in in_order}
        queue = [
            QueuedPass(operation.id, lane.run, lane.tenant, begun.lengths_left, lane.weight)
            for lane, operation, begun in in_order
        ]
        waiting = sum(sum(queued.lengths) for queued in queue)
        self._size.meet({lane.tenant for lane, _, _ in in_order})
        each = self._size.tokens(full=self._slot_budget, least=least_tokens(self._slot_budget))
        is_last = waiting <= self._free * each
        plan = plan_pass(
            queue,
            self._fairness,
            shares={lane.tenant: lane.share for lane, _, _ in in_order},
            token_budget=self._free * each if is_last else _most(each),
            full_budget=self._slot_budget,
            tags=self._tags,
        )
        self._fairness, self._tags = plan.fairness, plan.tags
        planned_now = [found[one] for one in dict.fromkeys(piece.id for piece in plan.pieces)]
        # First: a piece that is counted as begun must reach its pass.
        self._telemetry.claimed([operation for lane, operation, _ in planned_now if operation.id not in lane.started])
        parts: list[_Part] = []
        for part in parts_by_length(plan.pieces, queue):
            chosen = []
            for planned in part:
                lane, operation, begun = found[planned.id]
                lane.started[planned.id] = begun
                chosen.append(_Chosen(lane, operation, begun.next_piece(planned.sequences)))
            parts.append(_Part(chosen, is_last=False))
        if parts:
            parts[-1] = _Part(parts[-1].chosen, is_last=is_last)
        return parts

    def _may_run(self) -> list[tuple[Lane, ReadyOperation, PassOperation]]:
        """Return the operations that have sequences in no pass yet, in order of acceptance.

        The operations of one run are in order of seq_id, even where they were accepted the other way round.
        """
        placed: list[tuple[int, tuple[Lane, ReadyOperation, PassOperation]]] = []
        for lane in self._lanes:
            if not lane.is_busy and self._residency.is_at(lane.run, lane.next_seq_id) and self._turns.allows(lane):
                place = 0
                for operation in lane.passes():
                    place = max(place, operation.position)
                    begun = _begun(lane, operation)
                    if begun.outcome is None and begun.lengths_left:
                        placed.append((place, (lane, operation, begun)))
        placed.sort(key=lambda one: one[0])
        return [one for _, one in placed]

    def _slots_for(self, part: _Part) -> int:
        """Return the slots that the part takes.

        The last part that waits takes all free slots. A sequence that is too long for one slot takes all slots there are.
        """
        if part.is_last:
            return self._free
        return self._trainer.slots if part.tokens > _most(self._slot_budget) else 1

    # --- computing -------------------------------------------------------------------------------------------------

    def _start(self, part: _Part, slots: int) -> None:
        self._free -= slots
        begun = [(chosen.lane, chosen.operation, chosen.piece.operation) for chosen in part.chosen]
        self._track(self._run(part.chosen, slots), f"pass {self._base_model}", begun)

    def _track(self, work: Coroutine[Any, Any, None], name: str, begun: Sequence[_Begun]) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, begun))

    def _done(self, begun: Sequence[_Begun], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, Exception):
            log.error("task=%s failed operations=%d", task.get_name(), len(begun), exc_info=failure)
            _end(begun)
            for lane, _, _ in begun:
                self._complete_in_order(lane)
                # Later operations of the run may have waited for this one to end.
                self._outcomes.put_aside(lane.run)
        else:
            self._failure = self._failure or failure
        self._ended()

    async def _run(self, part: Sequence[_Chosen], slots: int) -> None:
        with self._in_hand.holding([chosen.operation.id for chosen in part]):
            await self._run_held(part, slots)
        for lane in {chosen.lane.run: chosen.lane for chosen in part}.values():
            self._complete_in_order(lane)

    async def _run_held(self, part: Sequence[_Chosen], slots: int) -> None:
        """Compute and note a part, or have its pieces computed one by one if it fails whole. Raises ``DeviceFailed``."""
        computed: ComputedPass | None = None
        try:
            computed = await self._computed(part, slots)
            self._size.note(computed.report.tokens / slots, computed.report.seconds)
            if has_failed_whole([result.error for result in computed.results]):
                await self._engine.check_device()
            # The next pass starts first, so that no core waits while results are noted.
            asyncio.get_running_loop().call_soon(self.begin)
            await self._note(computed, part)
        except Exception:
            log.exception("fused pass failed base=%s operations=%d", self._base_model, len(part))
            await self._engine.check_device()
            if computed is None and len(part) > 1:
                # One of them may be the cause. The others must not fail for it.
                self._parts.extendleft(_Part([chosen], is_last=False) for chosen in reversed(part))
                return
            _end([(chosen.lane, chosen.operation, chosen.piece.operation) for chosen in part])
            # Later operations of the runs may have waited for these to end.
            lanes = {chosen.lane.run: chosen.lane for chosen in part}.values()
            in_order = [begun for lane in lanes for begun in _started_in_order(lane)]
            await self._compute.run(partial(self._trainer.end_complete, in_order))

    async def _computed(self, part: Sequence[_Chosen], slots: int) -> ComputedPass:
        pieces = [chosen.piece for chosen in part]
        compute = partial(self._compute.clock.timed, partial(self._trainer.compute, pieces, slots=slots))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, compute)
        finally:
            self._free += slots

    async def _note(self, computed: ComputedPass, part: Sequence[_Chosen]) -> None:
        lanes = list({chosen.lane.run: chosen.lane for chosen in part}.values())
        in_order = [begun for lane in lanes for begun in _started_in_order(lane)]
        await self._compute.run(partial(self._trainer.finish, computed, in_order))
        self._report(computed.report, part)
        for lane in lanes:
            for operation in lane.passes():
                if (begun := lane.started.get(operation.id)) is not None:
                    self._losses.add(lane, operation, begun)
        self._begin_loss()

    def _begin_loss(self) -> None:
        """Start evaluating the custom loss whose turn it is, if none is under way."""
        if not self._stopping and (loss := self._losses.take()) is not None:
            begun = [(loss.lane, loss.operation, loss.begun)]
            self._track(self._evaluate(loss), f"custom loss {self._base_model}", begun)

    async def _evaluate(self, loss: LossToEvaluate) -> None:
        await self._losses.evaluate(loss, partial(_started_in_order, loss.lane))
        self._complete_in_order(loss.lane)

    def _complete_in_order(self, lane: Lane) -> None:
        for operation in list(lane.passes()):
            begun = lane.started.get(operation.id)
            if begun is None or begun.outcome is None:
                return
            self._outcomes.complete(lane, operation, begun.outcome)

    def _report(self, report: PassReport, part: Sequence[_Chosen]) -> None:
        tenants = len({chosen.lane.tenant for chosen in part})
        self.last = EndedPass(report, tenants, monotonic())
        self._telemetry.pass_done(report, tenants=tenants, operations=[chosen.operation for chosen in part])


def _end(begun: Sequence[_Begun]) -> None:
    """Fail the operations that have not ended."""
    for _, operation, progress in begun:
        if progress.outcome is None:
            progress.end(failure_of(operation))


def _most(slot_budget: int) -> int:
    """Return the most tokens of a pass on one slot."""
    return slot_budget + slot_budget // _HEADROOM


def _begun(lane: Lane, operation: ReadyOperation) -> PassOperation:
    """Return the operation's progress through passes: the lane's record of it, or a new one."""
    found = lane.started.get(operation.id)
    if found is not None:
        return found
    if not isinstance(operation.payload, TrainingBatch):
        raise TypeError(f"{operation.kind} without a batch")
    return PassOperation(lane.run, operation.payload, operation.kind is OperationKind.FORWARD_BACKWARD)


def _started_in_order(lane: Lane) -> list[PassOperation]:
    """Return the lane's operations that are in passes, by seq_id."""
    return [lane.started[operation.id] for operation in lane.passes() if operation.id in lane.started]
