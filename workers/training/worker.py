"""The trainer's loop: read operations, begin fused passes, optimizer steps and adapter tasks, write outcomes.

One worker for each base model that a process trains. While passes compute, the loop reads what was accepted meanwhile and
takes optimizer steps. Tasks beside the loop write completions, run operations on whole adapters and move adapters in and
out of memory. Invariants:

- A run's operations take effect strictly by seq_id, each once.
- An operation that fails fails alone.
- When a completion cannot be written, the run is dropped from memory and rebuilt from the ledger.
"""

import asyncio
import logging
from collections.abc import Awaitable, Collection, Sequence
from functools import partial
from time import monotonic

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import ProcessMustEnd, WeftError
from contracts.ids import RunId
from contracts.ledger_records import PendingOperation
from engine.model.device import DeviceFailed
from engine.piece_size import PieceSize
from ledger.runtime import Runtime
from ledger.statements import MAX_PENDING
from ledger.wakeups import handed_over_topic, recalls_topic, shares_topic, trainer_topic
from ledger.work_in_hand import remove_record
from store.repeat import repeat
from workers.leases.runs import RunLeases
from workers.training.adapter_tasks import AdapterTasks
from workers.training.completion_writer import CompletionWriter
from workers.training.creation_limits import CreationLimits
from workers.training.departures import Departures
from workers.training.fused_passes import FusedPasses
from workers.training.lanes import Lane, Lanes
from workers.training.operation_outcomes import OperationOutcomes
from workers.training.optimizer_steps import OptimizerSteps
from workers.training.payload_choice import PayloadChoice, choose
from workers.training.residency import AdapterResidency
from workers.training.trainer_report import TELL_SECONDS, TrainerReport
from workers.training.training_engine import TrainingEngine
from workers.training.turns import Turns

log = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
"""Longest time without a full look at the ledger, which finds the work of lost wake-ups."""
_OVERLAP = 512
"""Positions that are looked at again where several processes accept operations at once."""


_LOOKS_A_LIMIT = 4
"""Looks at the device's progress in the time of one stall limit."""
_GIVE_UP_SECONDS = 10.0
"""Longest time that a trainer whose device has failed takes to release its runs."""


class TrainingWorker:
    """Runs every training operation of one base model."""

    def __init__(self, runtime: Runtime, engine: TrainingEngine, leases: RunLeases) -> None:
        self.leases = leases
        self._base_model = engine.base_model
        self._engine = engine
        self._database = runtime.database
        self._ledger = runtime.ledger
        self._wakeups = runtime.wakeups
        self._topic = trainer_topic(leases.identity.id)
        self._recalls_topic = recalls_topic(leases.identity.id)
        self._data_folder = runtime.data_folder
        self._stall_limit = runtime.settings.stall_limit.total_seconds()
        self._lanes = Lanes()
        self._turns = Turns(
            self._lanes,
            engine.in_hand,
            CreationLimits(runtime, engine.base_model),
            most_attempts=runtime.settings.max_attempts,
            again=self._go_on,
        )
        self._writer = CompletionWriter(runtime)
        self.residency = AdapterResidency(runtime, engine, drain=self._writer.drain, on_room=self._wake)
        self._payloads = PayloadChoice(self._lanes, engine.pass_token_budget, is_resident=self.residency.holds)
        self.outcomes = OperationOutcomes(engine, self._lanes, self.residency, self._writer, wake=self._wake)
        self._tasks = AdapterTasks(
            runtime, engine, self._lanes, self.residency, self._writer, self.outcomes, self._turns, wake=self._wake
        )
        self._steps = OptimizerSteps(engine, self._lanes, self.residency, self.outcomes, self._turns)
        self._departures = Departures(leases, self._lanes, self.residency, drop=self.outcomes.drop)
        size = PieceSize(runtime.settings.piece_time.total_seconds())
        self._passes = FusedPasses(
            engine, self._lanes, self.residency, self.outcomes, self._turns, size=size, ended=self._go_on
        )
        self._report = TrainerReport(
            runtime,
            leases.identity,
            residents=self.residency.residents,
            last_pass=lambda: self._passes.last,
            held_since=lambda: leases.held_since,
        )
        leases.on_claims(self._look_at_claimed)
        leases.on_row(partial(engine.in_hand.open, runtime.data_folder, leases.identity.id))
        self._stopping = asyncio.Event()
        self._news = asyncio.Event()
        """Set when the ledger may hold operations that are not in the lanes yet."""
        self._again = asyncio.Event()
        """Set when another round may find work: when ``_news`` is set, and when a pass or step has ended."""
        self._recalled = asyncio.Event()
        """Set when operations in the lanes may have been cancelled."""
        self._must_look_at_all = asyncio.Event()
        """Set when the whole ledger is to be looked at: tenants' shares may have changed, or another trainer's run has come."""
        self._claimed: set[RunId] = set()
        """Runs that were claimed since the last look. They may have operations from long before."""
        self._swept = monotonic()

    async def run(self) -> None:
        """Work until ``stop``; then finish what is under way, and release each run as its snapshot is written.

        Raises ``ProcessMustEnd``: the device has failed, the group, or the writer of results. The runs are released then, and
        what was in hand stays pending.
        """
        writing = asyncio.create_task(self.outcomes.write(), name=f"completions {self._base_model}")
        leasing = asyncio.create_task(self.leases.run(), name=f"leases {self._base_model}")
        working = asyncio.create_task(self._work_to_the_end(writing), name=f"work {self._base_model}")
        watching = asyncio.create_task(self._watch(), name=f"watch {self._base_model}")
        telling = asyncio.create_task(self._tell_operators(), name=f"report {self._base_model}")
        tasks = (working, watching, leasing, writing, telling)
        try:
            await asyncio.wait([working, watching, writing], return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and (failed := writing.exception()) is not None:
                raise ProcessMustEnd("results of training cannot be written any more") from failed
            await (watching if watching.done() else working)
            self.leases.stop()
            await leasing
        except ProcessMustEnd as failure:
            self._engine.telemetry.device_failed(str(failure))
            await _cancelled(tasks)
            await self._abandon()
            raise
        finally:
            # After another error the lease must not be renewed: other trainers claim the runs once it has expired.
            for task in tasks:
                task.cancel()
        await self.leases.releases.release_all()
        self._engine.in_hand.close()
        await asyncio.to_thread(remove_record, self._data_folder, self.leases.identity.id)

    async def _work_to_the_end(self, writing: asyncio.Task[None]) -> None:
        await self._work()
        await self._passes.finished()
        await self._tasks.finished()
        await self._writer.drain()
        await self._give_up_runs()
        self._writer.close()
        await writing

    async def _watch(self) -> None:
        """Raise ``DeviceFailed`` once a call to the device has run for longer than it may."""

        async def look() -> None:
            if (longest := self._engine.compute.clock.longest()) > self._stall_limit:
                raise DeviceFailed(f"a call to the device has made no progress for {longest:.0f} s")

        failed = f"progress of base={self._base_model} could not be looked at"
        await repeat(look, seconds=self._stall_limit / _LOOKS_A_LIMIT, failed=failed)

    async def _tell_operators(self) -> None:
        failed = f"the report of base={self._base_model} could not be written"
        await repeat(self._report.tell, seconds=TELL_SECONDS, failed=failed)

    async def _abandon(self) -> None:
        try:
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                await self.leases.releases.give_up()
        except (WeftError, SQLAlchemyError, TimeoutError) as failure:
            log.error("the runs could not be released, they are free once the lease has ended: %s", failure)

    async def _give_up_runs(self) -> None:
        """Release the runs, so that others go on with them: those that are saved at once, each other one once it is saved."""
        await self._release_soon(self.leases.releases.release_all_but(self.residency.unsaved()))
        await self.residency.snapshot_all(lambda run: self._release_soon(self.leases.releases.release([run])))

    async def _release_soon(self, releasing: Awaitable[None]) -> None:
        """Await a release. One that fails is made up for at the end."""
        try:
            await releasing
        except WeftError as failure:
            log.warning("a run is released later: %s", failure.message)

    def stop(self) -> None:
        """Have ``run`` finish the passes in hand and end. No run is claimed any more."""
        self.leases.stop_claiming()
        self._stopping.set()
        self._wake()

    def _wake(self) -> None:
        self._wakeups.announce(self._topic)

    def _go_on(self) -> None:
        self._again.set()

    def _look_at_claimed(self, claimed: Collection[RunId], *, is_directed: bool) -> None:
        """Look for all operations of the runs ``claimed``. Look at the whole ledger if operators' directives have changed."""
        self._claimed.update(claimed)
        if is_directed:
            self._lanes.look_at_all()
        self._wake()

    # --- the loop --------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        topic, recalls = self._topic, self._recalls_topic
        whole = (shares_topic(), handed_over_topic(self.leases.identity.id))
        with (
            self._wakeups.listen(topic) as self._news,
            self._wakeups.listen(recalls) as self._recalled,
            self._wakeups.listen(*whole) as self._must_look_at_all,
            self._wakeups.listen(topic, recalls, *whole) as self._again,
        ):
            self._news.set()
            await repeat(
                self._round,
                seconds=lambda: max(0.0, self._next_round() - monotonic()),
                stopping=self._stopping,
                failed=f"training round failed base={self._base_model}",
                wake=self._again,
            )

    def _next_round(self) -> float:
        """Return the monotonic seconds of the next sweep, or of the next operation that a rate holds, if that comes first."""
        return min([self._swept + SWEEP_SECONDS, *(lane.starts_at for lane in self._lanes)])

    async def _round(self) -> None:
        """Read new operations, take due steps, and begin tasks and passes, which go on beside the next rounds."""
        if monotonic() - self._swept >= SWEEP_SECONDS:
            await self._sweep()
        if await self._departures.carry_out():
            self._again.set()
        if self._recalled.is_set():
            await self._drop_recalled()
        if self._must_look_at_all.is_set():
            self._must_look_at_all.clear()
            self._lanes.look_at_all()
            self._news.set()
        if self._news.is_set() or self._payloads.wanted():
            await self._look()
        self._turns.choose(is_computing=self._passes.are_under_way)
        if await self._steps.take():
            self._again.set()
        self._tasks.begin()
        self._passes.begin()

    async def _sweep(self) -> None:
        """Have the whole ledger looked at, and release runs that this trainer need not hold."""
        self._swept = monotonic()
        self._engine.telemetry.log_summary()
        self._lanes.look_at_all()
        self._news.set()
        self._recalled.set()
        self._tasks.try_creations_again()
        # Runs whose session has ended, and idle runs beyond this trainer's even part.
        await self._release(await self.leases.releases.ended())
        await self._release(await self.leases.releases.surplus())

    async def _release(self, runs: Sequence[RunId]) -> None:
        """Page out the idle runs among ``runs``, and release those whose adapters are on disk already."""
        gone: list[RunId] = []
        for run in runs:
            if (lane := self._lanes.get(run)) is not None and (lane.is_busy or lane.started or lane.has_work):
                continue
            if self.residency.holds(run):
                self.residency.page_out(run)
            elif self.residency.is_away(run):
                gone.append(run)
        if gone:
            await self.leases.releases.release(gone)

    # --- looking ---------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Read the operations accepted since the last look, and the payloads that the next passes need."""
        lanes = self._lanes
        async with self._database.read() as session:
            if self._news.is_set():
                self._news.clear()
                await self._read_claimed(session)
                more = True
                while more:
                    seen, resets = self._seen(), lanes.resets
                    found = await self._ledger.pending_training(
                        session,
                        self._base_model,
                        trainer=self.leases.identity.id,
                        after_position=seen,
                        known=lanes.known_after(seen),
                    )
                    self._drop_stale(found)
                    if lanes.resets != resets:
                        # From the beginning: the new lane of a run that was dropped must not hold later operations alone.
                        continue
                    lanes.add_pending(found)
                    more = len(found) == MAX_PENDING
            await self._place_lanes(session)
            if ids := choose(self._payloads.wanted()):
                loaded = await self._ledger.load(session, ids)
                lanes.add_payloads(loaded)
                if self._payloads.is_to_go_on(ids, [one.id for one in loaded]):
                    self._again.set()
        lanes.drop_idle()

    async def _read_claimed(self, session: AsyncSession) -> None:
        """Read the operations of runs that are new to this trainer, which may lie far before those seen last."""
        claimed, self._claimed = self._claimed, set()
        try:
            after, more = 0, bool(claimed)
            while more:
                found = await self._ledger.pending_of_runs(
                    session, self._base_model, claimed, trainer=self.leases.identity.id, after_position=after
                )
                self._drop_stale(found)
                self._lanes.add_some(found)
                after, more = found[-1].position if found else after, len(found) == MAX_PENDING
        except BaseException:
            self._claimed |= claimed
            raise

    async def _drop_recalled(self) -> None:
        """Drop runs whose lease is not the one in memory, and look at the whole ledger: operations were cancelled."""
        self._recalled.clear()
        held = {lane.run: lane.lease for lane in self._lanes}
        async with self._database.read() as session:
            valid = await self._ledger.leases(session, list(held))
        gone = [run for run, lease in held.items() if valid.get(run) != lease]
        for run in gone:
            self.outcomes.drop(run)

    async def _place_lanes(self, session: AsyncSession) -> None:
        """Have each lane stand where its adapter does, and both where the ledger does.

        - A hole before a lane's operations may be one that was rejected, and is final.
        - A lane may have been read before a transaction whose outcome this trainer did not hear, and its adapter after it.

        A run whose adapter does not have the effect of just the operations that are done is dropped and rebuilt.
        """
        unsure: dict[RunId, Lane] = {}
        for lane in self._lanes:
            is_misplaced = self.residency.holds(lane.run) and not self.residency.is_at(lane.run, lane.next_seq_id)
            if (is_misplaced or lane.has_hole) and not (lane.unwritten or lane.is_busy or lane.started):
                unsure[lane.run] = lane
        if not unsure:
            return
        positions = await self._ledger.lane_positions(session, list(unsure))
        for run, lane in unsure.items():
            position = positions[run]
            if self.residency.holds(run) and not self.residency.agrees_with(run, position):
                log.error("run=%s is dropped from memory: it is not what the ledger says", run)
                self.outcomes.drop(run)
            else:
                lane.move_to(position.next_seq_id)

    def _seen(self) -> int:
        """Return the position up to which no new operation can appear.

        Positions are given before their transactions commit, and transactions commit in any order.
        """
        overlap = 0 if self._database.has_one_service else _OVERLAP
        return max(0, self._lanes.cursor - overlap)

    def _drop_stale(self, found: Sequence[PendingOperation]) -> None:
        """Drop runs whose lease is not the one in memory: another trainer has held them meanwhile."""
        for run, lease in {one.run: one.lease for one in found}.items():
            lane = self._lanes.get(run)
            if (lane is not None and lane.lease != lease) or self.residency.lease_of(run) not in (None, lease):
                self.outcomes.drop(run)


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel ``tasks`` and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
