"""Runs tasks beside the passes, at most one for each run: operations on whole adapters, and loads of adapters into memory."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from time import monotonic
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from contracts.errors import (
    LeaseLost,
    OutcomeConflict,
    PoisonOperation,
    RunUnloaded,
    Unavailable,
    UnreadableOperation,
    WeftError,
)
from contracts.ids import RunId, TenantId
from contracts.ledger_records import ReadyOperation
from contracts.operations import LoadWeights, OperationKind, SaveWeights, SaveWeightsExternal, SaveWeightsForSampler
from ledger.runtime import Runtime
from ledger.untold import wake_pollers
from telemetry.context import working_on
from workers.training.adapter_restorer import CheckpointUnread
from workers.training.adapter_room import AdapterRoom
from workers.training.checkpoint_operations import CheckpointOperations
from workers.training.completion_writer import CompletionWriter
from workers.training.creation_limits import MOST_ASKED
from workers.training.lanes import PASS_KINDS, Lane, Lanes, creates, is_unreadable
from workers.training.operation_outcomes import OperationOutcomes, failure_of, left_out, unrestored
from workers.training.refusals import Refusals, unrecorded
from workers.training.residency import AdapterResidency
from workers.training.training_engine import TrainingEngine
from workers.training.turns import Turns

log = logging.getLogger(__name__)

_RETRIED = (LeaseLost, OutcomeConflict, Unavailable, SQLAlchemyError)
"""Errors that are not the operation's fault. The trainer that has the run's lease, this one or another, runs it again.

Of ``SQLAlchemyError`` come those alone that are no outage: an operation fails after the last of its ``Refusals``.
"""
_PAUSE_SECONDS = 1.0
"""Time between two tries of an operation while the database or the data folder is away, or its adapter cannot come in."""
_COME_IN_SECONDS = 30.0
"""Time for which an adapter that cannot be brought in, as for lack of memory, is tried again before its operation fails."""
_BY_PASSES = PASS_KINDS | {OperationKind.OPTIM_STEP}


class AdapterTasks:
    """Begins and tracks the tasks of one base model's lanes. A lane has at most one task, and no pass meanwhile."""

    def __init__(
        self,
        runtime: Runtime,
        engine: TrainingEngine,
        lanes: Lanes,
        residency: AdapterResidency,
        writer: CompletionWriter,
        outcomes: OperationOutcomes,
        turns: Turns,
        *,
        wake: Callable[[], None],
    ) -> None:
        """Call ``wake`` to have the worker look at the ledger."""
        self._engine = engine
        self._wakeups = runtime.wakeups
        self._lanes = lanes
        self._residency = residency
        self._checkpoints = CheckpointOperations(runtime, engine, residency)
        self._writer = writer
        self._outcomes = outcomes
        self._turns = turns
        self._most_attempts = runtime.settings.max_attempts
        self._wake = wake
        self._tasks: dict[RunId, asyncio.Task[None]] = {}
        self._room = AdapterRoom(lanes, residency)
        self._creating = asyncio.Lock()
        self._limits = turns.creations
        self._openers: set[TenantId] = set()
        """Tenants whose runs are being created."""
        self._refusals = Refusals()
        self._failure: BaseException | None = None

    def begin(self) -> None:
        """Begin the tasks that may begin, oldest operation first, as far as there is room in memory.

        Raises the error that has ended an earlier task, if it was no ``Exception`` (``GroupLost``, ``DeviceFailed``).
        """
        if self._failure is not None:
            raise self._failure
        # A dropped lane's task may still run while the run has a new lane.
        free = [lane for lane in self._lanes if not lane.is_busy and lane.run not in self._tasks]
        heads = [(lane, head) for lane in free if (head := lane.head) is not None]
        heads.sort(key=lambda one: one[1].position)
        self._room.begin_round()
        for lane, head in heads:
            if head.attempts >= self._most_attempts:
                self._start(lane, head, self._refuse(head))
            elif lane.restore_failure is not None and head.kind is not OperationKind.UNLOAD_MODEL:
                self._start(lane, head, self._refuse_unrestored(lane, lane.restore_failure))
            elif not self._turns.allows(lane):
                continue
            elif head.kind is OperationKind.UNLOAD_MODEL:
                self._start(lane, head, self._run_alone(lane, head))
            elif is_unreadable(head):
                self._start(lane, head, self._refuse_unreadable(lane, head))
            elif creates(head):
                self._begin_creation(lane, head, heads)
            elif not self._residency.holds(lane.run):
                if self._room.make(lane, head.position):
                    self._start(lane, head, self._bring_in(lane, head), retries=True)
            elif head.kind not in _BY_PASSES and self._residency.is_at(lane.run, lane.next_seq_id):
                self._start(lane, head, self._run_alone(lane, head))

    def _begin_creation(self, lane: Lane, head: ReadyOperation, heads: Sequence[tuple[Lane, ReadyOperation]]) -> None:
        """Begin the creation, or first ask whether there is room: no adapter leaves memory for a run that must wait."""
        # One at a time: whether the tenant has room for a run is known only once its creation has begun.
        if lane.tenant in self._openers or self._limits.holds_back(lane.tenant, lane.run):
            return
        if not self._limits.admits(lane.tenant, lane.run):
            asked = (other.run for other, first in heads if other.tenant == lane.tenant and creates(first))
            others = [run for run in islice(asked, MOST_ASKED) if run != lane.run]
            self._openers.add(lane.tenant)
            self._start(lane, head, self._ask(lane.tenant, [lane.run, *others]))
        elif self._room.make(lane, head.position):
            self._openers.add(lane.tenant)
            self._start(lane, head, self._create(lane, head))

    async def finished(self) -> None:
        """Wait until every task has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    def try_creations_again(self) -> None:
        """Have creations that wait because of a limit of open runs tried again."""
        self._limits.look_again()

    # --- one task --------------------------------------------------------------------------------------------------

    def _start(
        self, lane: Lane, head: ReadyOperation, work: Coroutine[Any, Any, bool], *, retries: bool = False
    ) -> None:
        lane.is_busy = True
        with working_on(head):
            # A task keeps the logging context of the moment of its creation.
            task = asyncio.create_task(self._run_held(lane, head, work, retries), name=f"adapter {lane.run}")
        self._tasks[lane.run] = task

        def ended(done: asyncio.Task[None]) -> None:
            failure = None if done.cancelled() else done.exception()
            del self._tasks[lane.run]
            lane.is_busy = False
            if isinstance(failure, Exception):
                # What was recorded of the operation is unknown.
                log.error("operation=%s kind=%s could not be ended", head.id, head.kind, exc_info=failure)
                self._outcomes.put_aside(lane.run)
                return
            self._failure = self._failure or failure
            # Of a lane that was dropped the ledger alone knows the operations.
            (self._wake if lane.is_dropped else self._turns.again)()

        task.add_done_callback(ended)

    async def _run_held(self, lane: Lane, head: ReadyOperation, work: Coroutine[Any, Any, bool], retries: bool) -> None:
        # In hand only once it has its place among others: a neighbour's death must not count against what waits.
        with self._engine.in_hand.waiting(head.id):
            is_away = await self._run(lane, head, work, retries)
        if is_away:
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _run(self, lane: Lane, head: ReadyOperation, work: Coroutine[Any, Any, bool], retries: bool) -> bool:
        """Await ``work``, which returns whether the operation has run, and record the outcome.

        An unforeseen error fails the operation, with ``retries`` only once it has come for ``_COME_IN_SECONDS``. Return
        whether the operation waits: for the database, the data folder or its adapter's coming in.
        """
        try:
            has_run = await work
        except CheckpointUnread as unread:
            # An adapter that is there stays: what came before the load need not be computed again.
            log.warning("operation=%s kind=%s cannot read its file now: %s", head.id, head.kind, unread)
            self._turns.put_off(head.id)
            return True
        except _RETRIED as failure:
            log.exception("operation=%s kind=%s could not be run or recorded; trying again later", head.id, head.kind)
            if isinstance(failure, SQLAlchemyError) and self._refusals.is_last(head):
                await self._fail(lane, head, unrecorded(head))
                return False
            self._turns.put_off(head.id)
            self._outcomes.drop(lane.run)
            wake_pollers(self._wakeups, [head.id])
            return isinstance(failure, Unavailable | SQLAlchemyError)
        except WeftError as error:
            await self._fail(lane, head, error)
        except Exception as failure:
            await self._engine.check_device()
            if retries and self._comes_in_later(lane, head):
                return True
            log.exception("operation=%s kind=%s failed", head.id, head.kind)
            await self._fail(lane, head, left_out(head, failure) if retries else failure_of(head))
        else:
            if has_run:
                self._refusals.forget(head)
                self._finish(lane, head)
        return False

    def _comes_in_later(self, lane: Lane, head: ReadyOperation) -> bool:
        """Return whether an adapter that could not be brought in, as for lack of memory, is tried again."""
        self._residency.forget(lane.run)
        now = monotonic()
        if lane.failing_since is None:
            log.warning("run=%s could not be brought in; trying again", lane.run, exc_info=True)
            lane.failing_since = now
        if now - lane.failing_since < _COME_IN_SECONDS:
            self._turns.put_off(head.id)
            return True
        lane.failing_since = None
        return False

    def _finish(self, lane: Lane, head: ReadyOperation) -> None:
        if lane.is_dropped:
            self._residency.forget(lane.run)
            return
        if head.is_replay:
            self._outcomes.complete_replay(lane, head, None)
            return
        lane.finish(head)
        self._residency.applied(lane.run, lane.next_seq_id - 1)
        log.debug("operation done kind=%s seq_id=%d", head.kind, head.seq_id)
        if head.kind is OperationKind.UNLOAD_MODEL:
            lane.waiting.clear()
            lane.loaded.clear()
            self.try_creations_again()
        if head.kind in (OperationKind.SAVE_WEIGHTS, OperationKind.LOAD_WEIGHTS):
            self._residency.snapshot(lane.run)

    async def _fail(self, lane: Lane, head: ReadyOperation, error: WeftError) -> None:
        if head.is_replay or not creates(head):
            self._outcomes.complete(lane, head, error)
            return
        self._residency.forget(lane.run)
        await self._checkpoints.fail_creation(head, error)
        lane.finish(head)
        lane.waiting.clear()
        lane.loaded.clear()

    # --- kinds of work ---------------------------------------------------------------------------------------------

    async def _refuse(self, head: ReadyOperation) -> bool:
        """Fail an operation at which too many trainers have ended."""
        log.error("operation=%s kind=%s is not run any more: %d trainers ended", head.id, head.kind, head.attempts)
        raise PoisonOperation(
            f"{head.attempts} trainers ended while they ran this {head.kind}, the last ones on nothing else; it is not "
            f"tried again. Change the request, or ask the operator for the cause (request {head.id})"
        )

    async def _bring_in(self, lane: Lane, head: ReadyOperation) -> bool:
        """Bring the adapter into memory. The operation itself runs in the next round."""
        try:
            await self._writer.drain(lane.run)
            if not lane.is_dropped:
                await self._come_in(lane, head)
        except (RunUnloaded, *_RETRIED):
            # RunUnloaded: the operation was accepted just before the run's unload was written.
            raise
        except WeftError as error:
            log.error("run=%s could not be restored: %s", head.lane, error.message)
            raise unrestored(error.message) from error
        finally:
            self._residency.no_longer_expect(lane.run)
        return False

    async def _come_in(self, lane: Lane, head: ReadyOperation) -> None:
        """Bring the adapter in, and have the lane stand where the adapter does."""
        rebuild = await self._residency.bring_in(head)
        if lane.is_dropped:
            self._residency.forget(lane.run)
            return
        if rebuild is not None:
            lane.begin_rebuild(rebuild, head)
        lane.has_just_arrived, lane.failing_since = True, None

    async def _refuse_unrestored(self, lane: Lane, failure: WeftError) -> bool:
        """Fail an operation whose adapter could not be rebuilt. The next operation has it tried again."""
        lane.restore_failure = None
        raise failure

    async def _ask(self, tenant: TenantId, runs: Sequence[RunId]) -> bool:
        """Ask which of the tenant's runs may be created. The creation itself begins in the next round."""
        try:
            await self._limits.ask(tenant, runs)
        finally:
            self._openers.discard(tenant)
        return False

    async def _create(self, lane: Lane, head: ReadyOperation) -> bool:
        """Make the adapter, unless a limit of open runs is reached."""
        try:
            async with self._creating:
                if not await self._limits.has_room(lane.tenant, lane.run):
                    return False
                has_run = await self._run_alone(lane, head)
            if not has_run and not lane.is_dropped:
                # Another trainer has opened the tenant's or the project's last run meanwhile.
                self._residency.forget(lane.run)
                self._limits.hold_back(lane.tenant, lane.run)
            return has_run
        finally:
            self._openers.discard(lane.tenant)
            self._residency.no_longer_expect(lane.run)

    async def _refuse_unreadable(self, lane: Lane, head: ReadyOperation) -> bool:
        """Fail an operation of which nothing can be run."""
        await self._writer.drain(lane.run)
        if lane.is_dropped:
            return False
        raise UnreadableOperation(
            f"this {head.kind} was recorded and cannot be read back; send it again (request {head.id})"
        )

    async def _unload(self, lane: Lane, head: ReadyOperation) -> bool:
        """Unload the run, unless operations before the unload wait that the lane does not know."""
        if await self._checkpoints.unload(head):
            return True
        log.warning("run=%s has operations before its unload that were not read; its lane is read again", lane.run)
        self._outcomes.drop(lane.run)
        return False

    async def _run_alone(self, lane: Lane, head: ReadyOperation) -> bool:
        """Run an operation on a whole adapter, once the completions before it are written.

        ``CheckpointOperations`` writes the operation's own completion.
        """
        await self._writer.drain(lane.run)
        if lane.is_dropped:
            return False
        self._engine.telemetry.claimed([head])
        match head.payload:
            case LoadWeights() as load if head.is_replay:
                await self._checkpoints.load_again(head, load)
            case SaveWeights() as save:
                await self._checkpoints.save(head, save)
            case SaveWeightsForSampler() as save:
                await self._checkpoints.save_for_sampler(head, save)
            case SaveWeightsExternal() as save:
                await self._checkpoints.save_external(head, save)
            case LoadWeights() as load:
                return await self._checkpoints.load(head, load)
            case _ if head.kind is OperationKind.CREATE_MODEL:
                return await self._checkpoints.create(head)
            case _ if head.kind is OperationKind.UNLOAD_MODEL:
                return await self._unload(lane, head)
            case _:
                raise TypeError(f"no handler for {head.kind}")
        return True
