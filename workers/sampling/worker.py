"""Worker of one base model's samples: claims pending samples, runs them, and records their outcomes in the ledger.

Samples have no order among each other. A sample that the end of the process cuts stays pending. The next process goes on
with its tokens.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TypeVar

from contracts.base_model import BaseModelFacts
from contracts.errors import EngineFailure, FilesUnread, Unavailable, UnreadableOperation, WeftError
from contracts.ledger_records import ReadyOperation
from contracts.operations import OperationKind, SampleOutput, SampleRequest, Unreadable
from contracts.sample_report import SampleReport
from contracts.vocabulary import BaseVocabulary
from ledger.runtime import Runtime
from ledger.wakeups import cancelled_samples_topic, gates_topic, sampling_topic, versions_topic
from store.batcher import Batcher
from store.repeat import repeat, wait_for_any
from store.unread_files import UnreadFiles
from telemetry.context import working_on
from telemetry.sampling import SamplingTelemetry
from tenants.checkpoints import CHECKPOINTS
from workers.sampling.claims import HeldBack, SampleClaims
from workers.sampling.continuation import Continuation
from workers.sampling.gate_cuts import GateCuts
from workers.sampling.lapsed_lease import LapsedLease
from workers.sampling.resumption import Resumption, Unfinished
from workers.sampling.sample_endings import FailedSample, Outcome, SampleEndings, tokens_used, unrecorded
from workers.sampling.sample_request import stop_rules
from workers.sampling.sample_runner import History, SampleRunner
from workers.sampling.swap import Swap

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.1
_RECORD_SECONDS = 5.0
"""Longest time in which an ending process records what it has drawn."""
_CANCELLED_SECONDS = 0.5
_LOOK_REST = 3.0
"""Rest after a look at the ledger, in times as long as the look. A flood announces each of its samples, and one look finds them
all; what it draws meanwhile needs the interpreter and the database, too."""
LEASE_LOOK_SECONDS = 0.1
"""Seconds between two looks at the lease, which ask nobody."""
SWEEP_SECONDS = 5.0
"""Longest time without a look at the ledger, in case a wake-up is lost."""


class SamplingWorker:
    """Worker of every pending sample of one base model."""

    def __init__(
        self,
        runtime: Runtime,
        facts: BaseModelFacts,
        vocabulary: BaseVocabulary,
        runner: SampleRunner,
        gate_cuts: GateCuts,
        swap: Swap,
        claims: SampleClaims,
        telemetry: SamplingTelemetry,
    ) -> None:
        self._runtime = runtime
        self._facts = facts
        self._vocabulary = vocabulary
        self._runner = runner
        self._gate_cuts = gate_cuts
        self._swap = swap
        self._claims = claims
        self._telemetry = telemetry
        self._endings: Batcher[tuple[ReadyOperation, Outcome], None] = Batcher(
            SampleEndings(runtime, facts.name, claims.heartbeat.identity.id).record
        )
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._drawn: dict[str, asyncio.Task[object]] = {}
        """Tasks whose samples are dispatched or drawn now; the others record an outcome."""
        self._recording: set[asyncio.Task[object]] = set()
        """Tasks that record an outcome."""
        self._leaving: set[asyncio.Task[object]] = set()
        """Tasks that give their samples back. A sample may be claimed again before its task has ended."""
        self._claimed_again: dict[asyncio.Task[object], int] = {}
        """Number of the latest claim of a sample that this process has claimed again while the task works on it."""
        self._is_sweep_due = False
        """True when the next look must sweep: samples that a lapse of the lease has cut may be given back."""
        self._cancelled: set[str] = set()
        """Samples that are drawn here although their operations have been ended from outside."""
        self._resumption = Resumption(runtime)
        self._lapse = LapsedLease(runtime, facts.name, claims.heartbeat, self._resumption)
        self._unread = UnreadFiles(runtime.data_folder, CHECKPOINTS)
        self._unfinished: list[Unfinished] = []
        """Samples that the end of this process has cut."""
        self._look_again = asyncio.Event()
        self._replicas_changed = asyncio.Event()
        self._swept_at = float("-inf")
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Work until ``stop``, then leave the samples in flight to the next process."""
        heartbeat = self._claims.heartbeat
        beating = asyncio.create_task(heartbeat.run())
        try:
            await self._work()
            unsaved = await self._resumption.save_at_end(self._unfinished, process=heartbeat.identity.id)
        finally:
            # Not before: others would take this process for dead while it saves.
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        await heartbeat.leave(unsaved)

    async def _work(self) -> None:
        """Claim and draw until ``stop``, record what is drawn to its end, and cut the other samples."""
        base_model = self._facts.name
        watching = [
            asyncio.create_task(self._claims.watch_replicas(self._replicas_changed)),
            asyncio.create_task(self._follow_replicas()),
            asyncio.create_task(self._watch(gates_topic(base_model), self._follow_gates, self._gates_seconds)),
            asyncio.create_task(self._watch(versions_topic(base_model), self._swap.leave_outdated)),
            asyncio.create_task(
                self._watch(cancelled_samples_topic(base_model), self._end_cancelled, self._cancelled_seconds)
            ),
            asyncio.create_task(self._watch_lease()),
        ]
        with self._runtime.wakeups.listen(sampling_topic(base_model)) as event:
            self._look_again = event
            failed = f"sampling dispatch failed base={base_model}"
            await repeat(
                self._look,
                seconds=self._look_seconds,
                stopping=self._stopping,
                wake=event,
                failed=failed,
                rest=_LOOK_REST,
            )
        if self._recording:
            # What is drawn to its end is recorded rather than drawn again.
            await asyncio.wait(self._recording, timeout=_RECORD_SECONDS)
        ending = [*watching, *self._in_flight.values()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._gate_cuts.close()
        await self._endings.settle()
        await self._runner.settle()
        await self._claims.settle()

    def stop(self) -> None:
        """End ``run`` soon. Samples that have not ended stay pending in the ledger."""
        self._stopping.set()

    async def _watch(
        self, topic: str, apply: Callable[[], Awaitable[None]], seconds: Callable[[], float] = lambda: SWEEP_SECONDS
    ) -> None:
        """Call ``apply`` at once, after each announcement of ``topic``, and at the latest after ``seconds``."""
        with self._runtime.wakeups.listen(topic) as event:
            failed = f"{topic} was announced and not seen to"
            await repeat(apply, seconds=seconds, stopping=self._stopping, wake=event, failed=failed)

    def _look_seconds(self) -> float:
        """Return the seconds until the next look, at the latest when a sample that a rate holds may run."""
        return min(SWEEP_SECONDS, self._claims.seconds_to_rate)

    def _gates_seconds(self) -> float:
        """Return the seconds until the gates are looked at again, at the latest when one of them expires."""
        return min(SWEEP_SECONDS, self._claims.next_expiry())

    def _cancelled_seconds(self) -> float:
        """Return the seconds until cancelled samples are looked for, unless one is announced.

        An operator's command announces it over Redis. A single service hears of it from the database only.
        """
        return _CANCELLED_SECONDS if self._runtime.database.has_one_service else SWEEP_SECONDS

    async def _follow_gates(self) -> None:
        """Cut what runs behind closed gates, and look for samples whose gates have opened."""
        await self._gate_cuts.apply()
        await self._claims.release_open()
        self._look_again.set()

    async def _follow_replicas(self) -> None:
        """Record whether this process takes samples, and look for some when it begins to."""

        async def tell() -> None:
            if await self._claims.tell_state():
                self._look_again.set()

        failed = f"the state of this sampling process could not be told base={self._facts.name}"
        wake = self._replicas_changed
        await repeat(tell, seconds=SWEEP_SECONDS, stopping=self._stopping, wake=wake, failed=failed)

    async def _end_cancelled(self) -> None:
        """Stop drawing the samples whose operations have been ended from outside."""
        if not self._drawn:
            return
        async with self._runtime.database.read() as session:
            ended = await self._runtime.ledger.ended(session, list(self._drawn))
        for operation in ended - self._cancelled:
            # A sample may have ended by itself meanwhile.
            if (task := self._drawn.get(operation)) is not None:
                self._cancelled.add(operation)
                task.cancel()

    async def _watch_lease(self) -> None:
        """Draw only while this process counts as alive: others draw the samples of one that does not."""
        if not self._runtime.database.has_one_service:
            failed = "samples without a lease could not be left"
            await repeat(self._mind_lease, seconds=LEASE_LOOK_SECONDS, stopping=self._stopping, failed=failed)

    async def _mind_lease(self) -> None:
        """Stop drawing while others may count this process as dead. After that, look at what was returned."""
        if await self._lapse.mind(self._drawn):
            self._is_sweep_due = True
            self._look_again.set()

    async def _look(self) -> None:
        """Sweep if it is time to, and start the samples that wait. After a failure the next look sweeps."""
        await wait_for_any([self._claims.heartbeat.has_looked, self._stopping], None)
        swept_at, self._swept_at = self._swept_at, float("-inf")
        if self._is_sweep_due or monotonic() - swept_at >= SWEEP_SECONDS:
            self._is_sweep_due = False
            # Those that were left stay claimed until their tokens are saved.
            await self._claims.sweep([*self._in_flight, *(operation.id for operation, _, _ in self._lapse.unsaved)])
            swept_at = monotonic()
        await self._start_samples()
        self._swept_at = swept_at

    async def _start_samples(self) -> None:
        """Claim and start the samples that may run now, as long as there is room."""
        is_more = True
        while is_more and self._may_claim:
            operations, is_more = await self._claims.claim()
            for operation in operations:
                working = self._in_flight.get(operation.id)
                if working is not None and working not in self._leaving:
                    # Taken from this process while it was cut off from the database.
                    self._claimed_again[working] = operation.claim
                    self._claims.claimed_twice(operation)
                    continue
                with working_on(operation):
                    # The task keeps the context that it begins in.
                    task = asyncio.create_task(self._serve(operation), name=f"sample {operation.id}")
                self._in_flight[operation.id] = task

    @property
    def _may_claim(self) -> bool:
        """False in a lapse of the lease, and until what it has cut is returned. Nobody would return what is claimed then."""
        return not self._stopping.is_set() and self._claims.heartbeat.may_draw and not self._lapse.is_off

    def _held(self, operation: ReadyOperation) -> ReadyOperation:
        """Return the current task's ``operation`` with the number of the claim by which this process has it now."""
        return replace(operation, claim=self._claimed_again.get(_this_task(), operation.claim))

    async def _save(self, operation: ReadyOperation, continuation: Continuation, history: History) -> None:
        """Save the tokens of the current task's sample. Raises ``Unavailable``."""
        held = (self._held(operation), continuation, history)
        await self._resumption.save([held], process=self._claims.heartbeat.identity.id)

    async def _serve(self, operation: ReadyOperation) -> None:
        """Run one sample and record its outcome, or give it back."""
        self._telemetry.claimed(operation)
        task, tokens = _this_task(), 0
        try:
            outcome = await self._outcome(operation)
            if outcome is not None:
                tokens = tokens_used(operation, outcome)
                await self._end(operation, outcome)
        except HeldBack as held:
            self._leaving.add(task)
            await _until_available(partial(self._claims.give_back, self._held(operation), held.gate))
        finally:
            self._claims.ended(operation, tokens=tokens)
            if self._in_flight.get(operation.id) is task:
                del self._in_flight[operation.id]
            self._claimed_again.pop(task, None)
            self._leaving.discard(task)
            if self._claims.left_some:
                self._look_again.set()

    async def _outcome(self, operation: ReadyOperation) -> Outcome | None:
        """Run one sample; None if it is left to other processes. Raises ``HeldBack``."""
        try:
            return await self._sampled(operation)
        except HeldBack:
            raise
        except Exception:
            log.exception("operation=%s kind=%s failed", operation.id, OperationKind.SAMPLE)
            failed = f"weft failed to run this sample; the service's log has the cause ({operation.id})"
            return FailedSample(EngineFailure(failed))

    async def _end(self, operation: ReadyOperation, outcome: Outcome) -> None:
        """Record the outcome of one sample."""
        task = _this_task()
        self._recording.add(task)
        try:
            await _until_available(partial(self._finish, operation, outcome))
        except Exception:
            log.exception("operation=%s kind=%s could not be recorded", operation.id, OperationKind.SAMPLE)
            await _until_available(partial(self._finish, operation, unrecorded(operation)))
        finally:
            self._recording.discard(task)

    async def _sampled(self, operation: ReadyOperation) -> Outcome | None:
        """Draw the sample and return its outcome, None if it is left to other processes."""
        if isinstance(operation.payload, Unreadable):
            unreadable = f"this sample was recorded and cannot be read back; send it again ({operation.id})"
            return FailedSample(UnreadableOperation(unreadable))
        if not isinstance(operation.payload, SampleRequest):
            raise TypeError(f"{operation.kind} without a sample request")
        try:
            rules = stop_rules(operation.payload, self._facts, self._vocabulary)
        except WeftError as error:
            return FailedSample(error)
        continuation = Continuation(
            operation.id,
            operation.payload,
            rules,
            cache_salt=operation.tenant,
            owner=operation.tenant,
            share=operation.share,
        )
        history = History()
        await _until_available(partial(self._resumption.resume, operation, continuation, history))
        return await self._drawn_to_its_end(operation, continuation, history)

    async def _drawn_to_its_end(
        self, operation: ReadyOperation, continuation: Continuation, history: History
    ) -> Outcome | None:
        task = self._drawn[operation.id] = _this_task()
        try:
            try:
                return await _until_available(partial(self._run, operation, continuation, history))
            except HeldBack:
                # The next process goes on from its tokens.
                await _until_available(partial(self._save, operation, continuation, history))
                raise
        except WeftError as error:
            return FailedSample.after(error, continuation)
        except asyncio.CancelledError:
            if self._stopping.is_set() or operation.id not in self._cancelled | self._lapse.cut:
                self._unfinished.append((self._held(operation), continuation, history))
                raise
            task.uncancel()
            if operation.id not in self._cancelled:
                self._lapse.unsaved.append((self._held(operation), continuation, history))
                return None
            # The operation is final, so this outcome is not recorded. Its tokens are counted.
            continuation.abandon()
            return continuation.output(), history.report(continuation)
        finally:
            self._drawn.pop(operation.id, None)
            self._unread.forget(operation.id)
            self._cancelled.discard(operation.id)
            self._lapse.cut.discard(operation.id)

    async def _run(
        self, operation: ReadyOperation, continuation: Continuation, history: History
    ) -> tuple[SampleOutput, SampleReport]:
        """Run the sample as the runner does. Raises ``EngineFailure`` for an adapter whose files stay unreadable."""
        try:
            return await self._runner.run(operation, continuation, history)
        except FilesUnread as unread:
            if not await self._unread.is_lost(operation.id):
                raise
            raise EngineFailure(f"its adapter's files cannot be read ({operation.id})") from unread

    async def _finish(self, operation: ReadyOperation, outcome: Outcome) -> None:
        """Record the outcome. Outcomes of one moment, as when a batch of sequences ends, share a transaction."""
        await self._endings.ask((operation, outcome))
        self._telemetry.finished(operation, outcome.error if isinstance(outcome, FailedSample) else outcome)


def _this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("not in a task")
    return task


async def _until_available(call: Callable[[], Awaitable[T]]) -> T:
    """Return what ``call`` returns, and repeat it while it raises ``Unavailable``: a sample survives an outage."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return await call()
        except Unavailable as outage:
            log.warning("%s", outage.message)
        await asyncio.sleep(pause)
        pause = min(2 * pause, SWEEP_SECONDS)
