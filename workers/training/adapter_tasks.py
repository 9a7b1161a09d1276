"""What runs beside the passes, a task a lane: operations on whole adapters, and adapters on their way into memory."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from contracts.errors import EngineFailure, LeaseLost, RunUnloaded, Unavailable, WeftError
from contracts.ids import RunId
from contracts.ledger_records import ReadyOperation
from contracts.operations import (
    LoadWeights,
    OperationKind,
    Result,
    SaveWeights,
    SaveWeightsForSampler,
)
from store.database import Database
from telemetry.context import working_on
from telemetry.training import TrainingTelemetry
from tenants.runs import open_runs
from workers.training.checkpoint_operations import CheckpointOperations
from workers.training.completion_writer import CompletionWriter
from workers.training.lanes import PASS_KINDS, Lane, Lanes, creates
from workers.training.residency import AdapterResidency

log = logging.getLogger(__name__)

_NOT_RECORDED = (LeaseLost, Unavailable, SQLAlchemyError)
"""What says nothing of the operation: it is done again, here or by the trainer that has the run."""
_BY_PASSES = PASS_KINDS | {OperationKind.OPTIM_STEP}
Complete = Callable[[Lane, ReadyOperation, Result | WeftError], None]


class AdapterTasks:
    """Begins and tracks the tasks of one base model's lanes. A lane has one at a time, and no pass meanwhile."""

    def __init__(
        self,
        *,
        base_model: str,
        database: Database,
        residency: AdapterResidency,
        checkpoints: CheckpointOperations,
        writer: CompletionWriter,
        complete: Complete,
        telemetry: TrainingTelemetry,
        lose: Callable[[RunId], None],
        wake: Callable[[], None],
        max_adapters: int | None,
    ) -> None:
        """``complete`` ends an operation, ``lose`` forgets a run in doubt, ``wake`` has the worker look again."""
        self._base_model = base_model
        self._database = database
        self._residency = residency
        self._checkpoints = checkpoints
        self._writer = writer
        self._complete = complete
        self._telemetry = telemetry
        self._lose = lose
        self._wake = wake
        self._max_adapters = max_adapters
        self._tasks: dict[RunId, asyncio.Task[None]] = {}
        self._arriving = 0
        self._creating = asyncio.Lock()
        self._is_full = False

    def begin(self, lanes: Lanes) -> None:
        """Begin what can be: oldest operation first, as far as there is room in memory."""
        # A lost lane's task may still run while the run has a new lane.
        free = [lane for lane in lanes if not lane.is_busy and lane.run not in self._tasks]
        heads = [(lane, head) for lane in free if (head := lane.head) is not None]
        heads.sort(key=lambda one: one[1].position)
        for lane, head in heads:
            if head.kind is OperationKind.UNLOAD_MODEL:
                self._start(lane, head, self._alone(lane, head))
            elif creates(head) or not self._residency.holds(lane.run):
                if not (creates(head) and self._is_full) and self._make_room(lanes, lane.run, head.position):
                    self._arriving += 1
                    self._start(lane, head, self._arrive(lane, head))
            elif head.kind not in _BY_PASSES:
                self._start(lane, head, self._alone(lane, head))

    async def finished(self) -> None:
        """Wait for every task."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    def try_creations_again(self) -> None:
        """The number of open runs may have changed."""
        self._is_full = False

    def _start(self, lane: Lane, head: ReadyOperation, work: Coroutine[Any, Any, None]) -> None:
        lane.is_busy = True
        with working_on(head):
            # The task keeps the context that it begins in.
            task = asyncio.create_task(work, name=f"adapter {lane.run}")
        self._tasks[lane.run] = task

        def ended(_done: asyncio.Task[None]) -> None:
            del self._tasks[lane.run]
            lane.is_busy = False
            self._wake()

        task.add_done_callback(ended)

    def _make_room(self, lanes: Lanes, arriving: RunId, position: int) -> bool:
        """Whether the adapter may come in for an operation accepted at ``position``, paging out others if need be.

        Idle adapters go first, least recently used first; then those whose next operation was accepted later. So the
        oldest operation always gets its adapter, and nobody starves. No more go than must: while those on their way out
        are being written, it waits. Who has just come in runs one operation before it goes: two would else take each
        other's room all the time.
        """
        while not self._residency.has_room(arriving, arriving=self._arriving, once_left=True):
            idle, younger = [], []
            for run in self._residency.residents():
                lane = lanes.get(run)
                if lane is None or not (lane.is_busy or lane.started or lane.has_work):
                    idle.append(run)
                elif lane.is_busy or lane.started or lane.has_just_arrived:
                    continue
                elif lane.head is None or lane.head.position > position:
                    younger.append(run)
            leaving = self._residency.least_recently_used(idle) or self._residency.least_recently_used(younger)
            if leaving is None:
                return False
            self._residency.page_out(leaving)
        return self._residency.has_room(arriving, arriving=self._arriving)

    async def _arrive(self, lane: Lane, head: ReadyOperation) -> None:
        """Bring the adapter in, or make it."""
        try:
            if creates(head):
                async with self._creating:
                    self._is_full = self._is_full or await self._has_reached_limit()
                    if not self._is_full:
                        await self._alone(lane, head)
                return
            await self._writer.drain(lane.run)
            if not lane.is_lost:
                await self._residency.bring_in(head)
                lane.has_just_arrived = True
        except RunUnloaded as error:
            # Accepted just before the unload was written.
            self._complete(lane, head, error)
        except _NOT_RECORDED:
            log.exception("run=%s could not be brought in; trying again later", head.lane)
            self._lose(lane.run)
        except WeftError as error:
            log.error("run=%s could not be restored: %s", head.lane, error.message)
            failure = EngineFailure("this model's training state could not be restored; load a checkpoint instead")
            self._complete(lane, head, failure)
        except Exception:
            log.exception("run=%s could not be brought in; trying again later", head.lane)
            self._lose(lane.run)
        finally:
            self._arriving -= 1

    async def _has_reached_limit(self) -> bool:
        """Whether as many runs are open as may be: a creation then waits for an unload or the end of a session."""
        if self._max_adapters is None:
            return False
        async with self._database.read() as session:
            return await open_runs(session, self._base_model) >= self._max_adapters

    async def _alone(self, lane: Lane, head: ReadyOperation) -> None:
        """Run an operation on a whole adapter once everything before it is written; it writes its own completion."""
        await self._writer.drain(lane.run)
        if lane.is_lost:
            return
        self._telemetry.taken_up([head])
        try:
            await self._dispatch(head)
        except _NOT_RECORDED:
            log.exception("operation=%s kind=%s could not be recorded", head.id, head.kind)
            self._lose(lane.run)
        except WeftError as error:
            await self._fail(lane, head, error)
        except Exception:
            log.exception("operation=%s kind=%s failed", head.id, head.kind)
            await self._fail(lane, head, failure_of(head))
        else:
            self._residency.applied(head)
            log.debug("operation done kind=%s seq_id=%d", head.kind, head.seq_id)
            lane.finish(head)
            if head.kind is OperationKind.UNLOAD_MODEL:
                lane.waiting.clear()
                lane.loaded.clear()
                self.try_creations_again()
            if head.kind in (OperationKind.SAVE_WEIGHTS, OperationKind.LOAD_WEIGHTS):
                self._residency.snapshot(lane.run)

    async def _fail(self, lane: Lane, head: ReadyOperation, error: WeftError) -> None:
        if not creates(head):
            self._complete(lane, head, error)
            return
        self._residency.forget(lane.run)
        try:
            await self._checkpoints.fail_creation(head, error)
        except _NOT_RECORDED:
            log.exception("operation=%s kind=%s could not be recorded", head.id, head.kind)
            self._lose(lane.run)
        else:
            lane.finish(head)
            lane.waiting.clear()
            lane.loaded.clear()

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


def failure_of(operation: ReadyOperation) -> EngineFailure:
    """What its owner is told when weft itself broke."""
    return EngineFailure(
        f"weft failed to run this {operation.kind}; the service's log has the cause (request {operation.id})"
    )
