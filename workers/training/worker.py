"""The trainer's loop: operations in, fused passes through the engine, outcomes into the ledger.

One worker per base model and process. While passes compute, the loop reads what was accepted meanwhile, optimizer steps are
taken, and the completion writer writes what is done; operations on whole adapters and adapters on their way in and out run
beside it. Invariants:
a run's operations take effect strictly by seq_id, each once; an operation that fails fails alone; when a completion cannot
be written, the run is forgotten and rebuilt from the ledger.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter

from contracts.errors import WeftError
from contracts.ids import RunId
from contracts.ledger_records import Completion, PendingOperation, ReadyOperation
from contracts.operations import OptimStep, Result
from engine.training.trainer import Trainer
from ledger.ledger import Ledger
from ledger.statements import MAX_PENDING
from ledger.wakeups import Wakeups, trainer_topic
from store.database import Database
from store.repeat import wait_for_any
from telemetry.training import TrainingTelemetry
from workers.compute_thread import ComputeThread
from workers.leases.runs import RunLeases
from workers.training.adapter_tasks import AdapterTasks, failure_of
from workers.training.checkpoint_operations import CheckpointOperations
from workers.training.completion_writer import CompletionWriter
from workers.training.fused_passes import FusedPasses
from workers.training.lanes import Lane, Lanes
from workers.training.residency import AdapterResidency
from workers.training.statistics import TrainingStatistics

log = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
"""Longest time without a full look at the ledger: the net below lost wake-ups."""
TELL_SECONDS = 60.0
"""Time between two lines in the log that sum up what was computed; each pass has a line of its own on level debug."""
_PAYLOADS_AT_ONCE = 512
_OVERLAP = 512
"""Positions that are looked at again where many accept operations at once."""


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
        leases: RunLeases,
        residency: AdapterResidency,
        checkpoints: CheckpointOperations,
        statistics: TrainingStatistics,
        telemetry: TrainingTelemetry,
        pass_token_budget: int,
        max_adapters: int | None,
    ) -> None:
        """``max_adapters`` is how many runs may be open at once, None for no limit."""
        self.statistics = statistics
        self._telemetry = telemetry
        self._base_model = base_model
        self._trainer = trainer
        self._compute = compute
        self._database = database
        self._ledger = ledger
        self._wakeups = wakeups
        self._leases = leases
        self._topic = trainer_topic(leases.identity.id)
        self._residency = residency
        self._token_budget = pass_token_budget
        self._lanes = Lanes()
        self._again = asyncio.Event()
        self._writer = CompletionWriter(database=database, ledger=ledger, on_written=self._written, on_lost=self.lose)
        residency.work_with(drain=self._writer.drain, left=self._wake)
        self._tasks = AdapterTasks(
            base_model=base_model,
            database=database,
            residency=residency,
            checkpoints=checkpoints,
            writer=self._writer,
            complete=self._complete,
            telemetry=telemetry,
            lose=self.lose,
            wake=self._wake,
            max_adapters=max_adapters,
        )
        self._passes = FusedPasses(
            base_model=base_model,
            trainer=trainer,
            compute=compute,
            lanes=self._lanes,
            residency=residency,
            statistics=statistics,
            telemetry=telemetry,
            token_budget=pass_token_budget,
            complete=self._complete,
            ended=self._again.set,
        )
        leases.tell_claims(self._runs_claimed)
        self._stopping = False
        self._swept = monotonic()
        self._told = TrainingStatistics()
        self._told_at = monotonic()

    async def run(self) -> None:
        """Work until ``stop``; then finish what is under way, snapshot what is in memory and hand the runs over."""
        writing = asyncio.create_task(self._writer.run(), name=f"completions {self._base_model}")
        leasing = asyncio.create_task(self._leases.run(), name=f"leases {self._base_model}")
        try:
            await self._work()
        except BaseException:
            # Others take over as soon as the lease ends.
            leasing.cancel()
            raise
        await self._passes.finished()
        await self._tasks.finished()
        await self._writer.drain()
        await self._residency.snapshot_all()
        self._writer.close()
        await writing
        self._leases.stop()
        await leasing
        await self._leases.release_all()

    async def _work(self) -> None:
        with self._wakeups.listen(self._topic) as news:
            news.set()
            while not self._stopping:
                await self._guarded_round(news)
                if not self._stopping and not await wait_for_any((news, self._again), SWEEP_SECONDS):
                    news.set()

    def _runs_claimed(self) -> None:
        """Runs are new to this trainer: what was accepted for them before is looked for."""
        self._lanes.cursor = 0
        self._wake()

    def stop(self) -> None:
        """Finish the passes in hand, then end."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        self._wakeups.announce(self._topic)

    async def _guarded_round(self, news: asyncio.Event) -> None:
        self._again.clear()
        try:
            if monotonic() - self._swept > SWEEP_SECONDS:
                await self._sweep()
            if news.is_set() or any(lane.to_load(self._token_budget) for lane in self._lanes):
                await self._look(news)
            await self._round()
        except Exception:
            log.exception("training round failed base=%s; trying again after a pause", self._base_model)
            news.clear()

    async def _sweep(self) -> None:
        """The net below lost wake-ups, and leave for adapters whose session is over."""
        self._swept = monotonic()
        self._tell()
        self._lanes.cursor = 0
        self._tasks.try_creations_again()
        # Those whose session is over, and some of those that another trainer has more time for.
        await self._let_go(await self._leases.ended())
        await self._let_go(await self._leases.surplus())

    async def _let_go(self, runs: Sequence[RunId]) -> None:
        """Idle ones of the runs leave memory, and then this trainer."""
        gone: list[RunId] = []
        for run in runs:
            if (lane := self._lanes.get(run)) is not None and (lane.is_busy or lane.started or lane.has_work):
                continue
            if self._residency.holds(run):
                self._residency.page_out(run)
            elif self._residency.is_away(run):
                gone.append(run)
        if gone:
            await self._leases.release(gone)

    def _tell(self) -> None:
        """What was computed since the last time, for people."""
        if monotonic() - self._told_at < TELL_SECONDS:
            return
        new = self.statistics.since(self._told)
        if new.passes or new.optimizer_steps:
            log.info("trained base=%s seconds=%.0f %s", self._base_model, monotonic() - self._told_at, new)
        self._told, self._told_at = replace(self.statistics), monotonic()

    # --- looking ---------------------------------------------------------------------------------------------------

    async def _look(self, news: asyncio.Event) -> None:
        """Read what was accepted since the last look, and the payloads that the next passes need."""
        lanes = self._lanes
        async with self._database.read() as session:
            if news.is_set():
                news.clear()
                more = True
                while more:
                    found = await self._ledger.pending_training(
                        session, self._base_model, trainer=self._leases.identity.id, after_position=self._seen()
                    )
                    self._drop_stale(found)
                    lanes.take_in(found)
                    more = len(found) == MAX_PENDING
                if holes := [lane.run for lane in lanes if lane.has_hole and not lane.unwritten and not lane.is_busy]:
                    lanes.skip(await self._ledger.next_seq_ids(session, holes))
            wanted = [one for lane in lanes for one in lane.to_load(self._token_budget)]
            if wanted:
                wanted.sort(key=lambda one: one.position)
                ids = [one.id for one in wanted[:_PAYLOADS_AT_ONCE]]
                lanes.put_payloads(await self._ledger.load(session, ids))
        lanes.drop_idle()

    def _seen(self) -> int:
        """Up to where nothing new can come: positions are given before transactions commit, which they do in any order."""
        overlap = 0 if self._database.has_one_service else _OVERLAP
        return max(0, self._lanes.cursor - overlap)

    def _drop_stale(self, found: Sequence[PendingOperation]) -> None:
        """A run that was another trainer's meanwhile: what is here of it is from before."""
        for run, lease in {one.run: one.lease for one in found}.items():
            lane = self._lanes.get(run)
            if (lane is not None and lane.lease != lease) or self._residency.lease_of(run) not in (None, lease):
                self.lose(run)

    # --- computing -------------------------------------------------------------------------------------------------

    async def _round(self) -> None:
        """Optimizer steps that are due; then whatever can be is begun, and goes on beside the next rounds."""
        if await self._steps():
            self._again.set()
        self._tasks.begin(self._lanes)
        self._passes.begin()

    async def _steps(self) -> bool:
        """One fused step of every adapter whose next operation is an optimizer step."""
        due: list[tuple[Lane, ReadyOperation, OptimStep]] = []
        for lane in self._lanes:
            head = lane.head
            if head is None or lane.is_busy or not self._residency.holds(lane.run):
                continue
            if isinstance(head.payload, OptimStep):
                due.append((lane, head, head.payload))
        if not due:
            return False
        self._telemetry.taken_up([head for _, head, _ in due])
        started = perf_counter()
        outcomes: Sequence[Result | WeftError]
        try:
            steps = [(lane.run, step) for lane, _, step in due]
            outcomes = await self._compute.run(partial(self._trainer.optim_steps, steps))
        except Exception:
            log.exception("optimizer step failed base=%s operations=%d", self._base_model, len(due))
            outcomes = [failure_of(head) for _, head, _ in due]
        seconds = perf_counter() - started
        self.statistics.add_steps(len(due), seconds=seconds)
        self._telemetry.steps_done([head for _, head, _ in due], seconds=seconds)
        for (lane, head, _), outcome in zip(due, outcomes, strict=True):
            self._complete(lane, head, outcome)
        return True

    # --- ending operations -----------------------------------------------------------------------------------------

    def _complete(self, lane: Lane, operation: ReadyOperation, outcome: Result | WeftError) -> None:
        """The operation has had its effect, or none: its lane goes on, its completion is on its way."""
        if lane.is_lost:
            return
        self._residency.applied(operation)
        self._telemetry.finished(operation, outcome, share=lane.share)
        lane.finish(operation)
        lane.unwritten += 1
        self._writer.put([Completion(operation, outcome)])
        if not lane.started:
            self._residency.snapshot_if_due(lane.run)

    def _written(self, completion: Completion) -> None:
        lane = self._lanes.get(RunId(completion.operation.lane))
        if lane is not None and lane.unwritten:
            lane.unwritten -= 1
            if lane.has_hole:
                self._wake()

    def lose(self, run: RunId) -> None:
        """Memory and ledger may differ: forget the run, which is rebuilt for its next operation."""
        self._lanes.lose(run)
        self._residency.forget(run)
