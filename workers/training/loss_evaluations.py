"""Evaluation of custom losses beside the passes: one at a time on a thread of its own, in fair order of their tenants.

The order is deficit round robin by work (``engine.round_robin``). An evaluation is charged the most that one may take, and is
given back what it did not take, however it ends. Called from the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from contracts.errors import WeftError
from contracts.ids import RequestId
from contracts.ledger_records import ReadyOperation
from engine.round_robin import Fairness, Verdict, take_turns
from engine.training.custom_loss import MOST_WORK, Evaluated, LossMeter
from engine.training.pass_operation import PassOperation
from workers.training.lanes import Lane
from workers.training.operation_outcomes import failure_of
from workers.training.training_engine import TrainingEngine
from workers.training.turns import Turns

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LossToEvaluate:
    """An operation whose custom loss is evaluated next, or waits for that."""

    lane: Lane
    operation: ReadyOperation
    begun: PassOperation

    @property
    def cost(self) -> int:
        """Most work that the evaluation may take, in elements."""
        return MOST_WORK


class LossEvaluations:
    """Custom losses of one base model whose logprobs are known."""

    def __init__(self, engine: TrainingEngine, turns: Turns) -> None:
        self._engine = engine
        self._turns = turns
        self._waiting: dict[RequestId, LossToEvaluate] = {}
        self._fairness = Fairness()
        self._is_free = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"custom-loss-{engine.base_model}")

    def add(self, lane: Lane, operation: ReadyOperation, begun: PassOperation) -> None:
        """Have the operation's loss evaluated in its turn, unless it waits for that or had it already."""
        if begun.awaits_loss and not begun.is_evaluating:
            begun.is_evaluating = True
            self._waiting[operation.id] = LossToEvaluate(lane, operation, begun)

    def take(self) -> LossToEvaluate | None:
        """Return the loss whose turn it is, for ``evaluate``; None while one is under way or none may begin."""
        if not self._is_free or not self._waiting:
            return None
        self._waiting = {one: loss for one, loss in self._waiting.items() if loss.begun.outcome is None}
        tenants: dict[str, list[LossToEvaluate]] = {}
        for loss in self._waiting.values():
            if self._turns.allows(loss.lane):
                tenants.setdefault(loss.lane.tenant, []).append(loss)
        chosen: list[LossToEvaluate] = []

        def offer(_: str, loss: LossToEvaluate) -> Verdict:
            if chosen:
                return Verdict.FULL
            chosen.append(loss)
            return Verdict.TAKEN

        if not tenants:
            return None
        quanta = {tenant: waiting[0].lane.share * MOST_WORK for tenant, waiting in tenants.items()}
        self._fairness = take_turns(tenants, self._fairness, quanta=quanta, offer=offer)
        self._is_free = False
        return self._waiting.pop(chosen[0].operation.id)

    async def evaluate(self, loss: LossToEvaluate, in_order: Callable[[], Sequence[PassOperation]]) -> None:
        """Evaluate a loss that was taken. Its backward pass is planned with the next ones.

        ``in_order`` gives the lane's operations that are in passes then, by seq_id: others have joined meanwhile.
        """
        with self._engine.in_hand.holding([loss.operation.id]):
            try:
                found = await self._evaluated(loss)
            finally:
                self._is_free = True
            finish = partial(self._engine.trainer.finish_evaluated, loss.begun, found, in_order())
            # On the thread that notes the results of passes: the state of an operation has one owner.
            await self._engine.compute.run(finish)

    async def _evaluated(self, loss: LossToEvaluate) -> Evaluated | WeftError:
        meter = LossMeter()
        evaluate = partial(self._engine.compute.clock.timed, partial(loss.begun.evaluate, meter))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, evaluate)
        except WeftError as error:
            return error
        except Exception:
            log.exception("custom loss failed base=%s request=%s", self._engine.base_model, loss.operation.id)
            return failure_of(loss.operation)
        finally:
            self._fairness = self._fairness.credit(loss.lane.tenant, loss.cost - meter.work)

    def close(self) -> None:
        """Drop the losses that wait. None is under way any more."""
        self._waiting.clear()
        self._thread.shutdown()
