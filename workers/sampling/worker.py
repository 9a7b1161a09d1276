"""The sampler's loop: pending samples in, replica requests out, outcomes into the ledger.

A sample keeps no order with others. One that is cut by the end of the process stays pending and is sampled again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import TypeVar

from contracts.base_model import BaseModelFacts
from contracts.errors import EngineFailure, Unavailable, WeftError
from contracts.ledger_records import Completion, ReadyOperation
from contracts.operations import OperationKind, Result, SampleOutput, SampleRequest
from contracts.sample_report import SampleReport
from contracts.vocabulary import BaseVocabulary
from ledger.ledger import Ledger
from ledger.statements import MAX_READY
from ledger.wakeups import Wakeups, gates_topic, sampling_topic, versions_topic
from store.batcher import Batcher
from store.database import Database
from store.repeat import wait_for
from telemetry.context import working_on
from telemetry.sampling import SamplingTelemetry
from tenants.gates import clear_in_flight
from tenants.sample_reports import record_reports
from workers.leases.pools import PoolHeartbeat
from workers.sampling.continuation import Continuation
from workers.sampling.gate_cache import GateCache
from workers.sampling.sample_request import stop_rules
from workers.sampling.sample_runner import History, SampleRunner

log = logging.getLogger(__name__)

T = TypeVar("T")
Outcome = tuple[SampleOutput, SampleReport] | WeftError

_FIRST_PAUSE_SECONDS = 0.1
SWEEP_SECONDS = 5.0
"""Longest time without a look at the ledger: the net below lost wake-ups."""


class SamplingWorker:
    """Takes up every pending sample of one base model."""

    def __init__(
        self,
        *,
        base: BaseModelFacts,
        vocabulary: BaseVocabulary,
        runner: SampleRunner,
        gate_cache: GateCache,
        database: Database,
        ledger: Ledger,
        wakeups: Wakeups,
        heartbeat: PoolHeartbeat,
        most_taken: int | None,
        telemetry: SamplingTelemetry,
    ) -> None:
        """``most_taken`` is how many samples this process takes from those that it shares them with; None: it is alone."""
        self._base = base
        self._vocabulary = vocabulary
        self._runner = runner
        self._gate_cache = gate_cache
        self._database = database
        self._ledger = ledger
        self._wakeups = wakeups
        self._heartbeat = heartbeat
        self._most_taken = most_taken
        self._telemetry = telemetry
        self._endings: Batcher[tuple[ReadyOperation, Outcome], None] = Batcher(self._record)
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._has_room = asyncio.Event()
        self._position = 0
        self._stopping = False

    async def run(self) -> None:
        """Work until ``stop``; samples in flight are then left to the next process."""
        watching = [
            asyncio.create_task(self._heartbeat.run()),
            asyncio.create_task(self._watch(gates_topic(self._base.name), self._apply_gates)),
            asyncio.create_task(self._watch(versions_topic(self._base.name), self._runner.apply_versions)),
        ]
        swept = float("-inf")
        with self._wakeups.listen(sampling_topic(self._base.name)) as event:
            self._has_room = event
            while not self._stopping:
                event.clear()
                try:
                    if monotonic() - swept >= SWEEP_SECONDS:
                        await self._sweep()
                        swept = monotonic()
                    await self._dispatch()
                except Exception:
                    log.exception("sampling dispatch failed base=%s; trying again after a pause", self._base.name)
                    swept = float("-inf")
                await wait_for(event, SWEEP_SECONDS)
        self._heartbeat.stop()
        ending = [*watching, *self._in_flight.values()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._runner.settle()
        await self._heartbeat.leave()

    def stop(self) -> None:
        """End; nothing accepted is lost."""
        self._stopping = True
        self._wakeups.announce(sampling_topic(self._base.name))

    async def _watch(self, topic: str, apply: Callable[[], Awaitable[None]]) -> None:
        """Cut what is in flight when gates close or newer versions are published."""
        with self._wakeups.listen(topic) as event:
            while True:
                event.clear()
                try:
                    await apply()
                except Exception:
                    log.exception("%s was announced and not seen to; trying again", topic)
                await wait_for(event, SWEEP_SECONDS)

    async def _apply_gates(self) -> None:
        await self._gate_cache.refresh()
        await self._runner.apply_gates()

    async def _sweep(self) -> None:
        """The net below lost wake-ups, and below transactions whose end was not heard of: a database that goes away in a
        commit may have noted that samples are taken, and this process does not know them.
        """
        self._position = 0
        if self._most_taken is not None:
            process, known = self._heartbeat.identity.id, list(self._in_flight)
            async with self._database.write() as transaction:
                await self._ledger.return_samples(transaction, self._base.name, process=process, but=known)

    async def _dispatch(self) -> None:
        """Start every sample that waits, or as many as this process takes."""
        while not self._stopping:
            operations, are_all = await self._waiting()
            for operation in operations:
                if operation.id not in self._in_flight:
                    with working_on(operation):
                        # The task keeps the context that it begins in.
                        task = asyncio.create_task(self._serve(operation), name=f"sample {operation.id}")
                    self._in_flight[operation.id] = task
            if are_all:
                break

    async def _waiting(self) -> tuple[list[ReadyOperation], bool]:
        """Some samples that are not begun, of the oldest; and whether no more are to be begun now."""
        if self._most_taken is None:
            async with self._database.read() as session:
                found = await self._ledger.pending_samples(session, self._base.name, after_position=self._position)
            self._position = max((operation.position for operation in found), default=self._position)
            return found, len(found) < MAX_READY
        room = self._most_taken - len(self._in_flight)
        if room <= 0:
            return [], True
        async with self._database.write() as transaction:
            process = self._heartbeat.identity.id
            found = await self._ledger.claim_samples(transaction, self._base.name, process=process, most=room)
        return found, len(found) < min(room, MAX_READY)

    async def _serve(self, operation: ReadyOperation) -> None:
        self._telemetry.taken_up(operation)
        try:
            outcome = await self._sampled(operation)
        except Exception:
            log.exception("operation=%s kind=%s failed", operation.id, OperationKind.SAMPLE)
            outcome = EngineFailure(f"weft failed to run this sample; the service's log has the cause ({operation.id})")
        try:
            await _until_available(partial(self._finish, operation, outcome))
        except Exception:
            log.exception("operation=%s kind=%s could not be recorded", operation.id, OperationKind.SAMPLE)
            await _until_available(partial(self._finish, operation, _unrecorded(operation)))
        finally:
            self._in_flight.pop(operation.id, None)
            if self._most_taken is not None:
                # Not all that wait may have been taken, and others may have given some back.
                self._has_room.set()

    async def _sampled(self, operation: ReadyOperation) -> Outcome:
        if not isinstance(operation.payload, SampleRequest):
            raise TypeError(f"{operation.kind} without a sample request")
        try:
            rules = stop_rules(operation.payload, self._base, self._vocabulary)
            continuation = Continuation(operation.id, operation.payload, rules, cache_salt=operation.tenant)
            return await _until_available(partial(self._runner.run, operation, continuation, History()))
        except WeftError as error:
            return error

    async def _finish(self, operation: ReadyOperation, outcome: Outcome) -> None:
        """Record the end; those of one moment, as when a batch of sequences ends, in one transaction."""
        await self._endings.ask((operation, outcome))
        self._telemetry.finished(operation, outcome)

    async def _record(self, ends: Sequence[tuple[ReadyOperation, Outcome]]) -> list[None]:
        """One transaction: the results, their reports, and that the samples are no longer in flight."""
        completions, reports = [], []
        for operation, outcome in ends:
            result: Result | WeftError = outcome if isinstance(outcome, WeftError) else outcome[0]
            completions.append(Completion(operation, result))
            if not isinstance(outcome, WeftError):
                reports.append((operation.tenant, operation.id, outcome[1]))
        async with self._database.write() as transaction:
            await self._ledger.complete(transaction, completions)
            await clear_in_flight(transaction, [operation.id for operation, _ in ends], self._heartbeat.identity.id)
            await record_reports(transaction, reports)
            self._ledger.announce_cleared_samples(transaction, self._base.name)
        return [None] * len(ends)


async def _until_available(call: Callable[[], Awaitable[T]]) -> T:
    """``call``, again as long as the database cannot be had: a sample does not fail for that."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return await call()
        except Unavailable as outage:
            log.warning("%s", outage.message)
        await asyncio.sleep(pause)
        pause = min(2 * pause, SWEEP_SECONDS)


def _unrecorded(operation: ReadyOperation) -> EngineFailure:
    return EngineFailure(f"weft could not record this sample; the service's log has the cause ({operation.id})")
