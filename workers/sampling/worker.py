"""The sampler's loop: pending samples in, replica requests out, outcomes into the ledger.

A sample keeps no order with others. One that is cut by the end of the process stays pending and is sampled again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

from engine.contracts.base_model import BaseModelFacts
from engine.contracts.errors import EngineFailure, WeftError
from engine.contracts.operations import OperationKind, Result, SampleOutput, SampleRequest
from engine.contracts.sample_report import SampleReport
from engine.contracts.vocabulary import BaseVocabulary
from tenants.database import Database
from tenants.gates import leave, leave_all
from tenants.sample_reports import record_report
from workers.ledger.ledger import Ledger
from workers.ledger.operations import Completion, ReadyOperation
from workers.ledger.wakeups import Wakeups, gates_topic, sampling_topic, versions_topic, wait_for
from workers.sampling.continuation import Continuation
from workers.sampling.gate_board import GateBoard
from workers.sampling.sample_request import stop_rules
from workers.sampling.sample_runner import SampleRunner

log = logging.getLogger(__name__)

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
        board: GateBoard,
        database: Database,
        ledger: Ledger,
        wakeups: Wakeups,
        process: str,
    ) -> None:
        """``process`` names this process among those that sample."""
        self._base = base
        self._vocabulary = vocabulary
        self._runner = runner
        self._board = board
        self._database = database
        self._ledger = ledger
        self._wakeups = wakeups
        self._process = process
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    async def run(self) -> None:
        """Work until ``stop``; samples in flight are then left to the next process."""
        async with self._database.write() as transaction:
            await leave_all(transaction, self._process)
        watching = [
            asyncio.create_task(self._watch(gates_topic(self._base.name), self._apply_gates)),
            asyncio.create_task(self._watch(versions_topic(self._base.name), self._runner.apply_versions)),
        ]
        position, swept = 0, monotonic()
        with self._wakeups.listen(sampling_topic(self._base.name)) as event:
            while not self._stopping:
                event.clear()
                try:
                    position = await self._dispatch_after(position)
                except Exception:
                    log.exception("sampling dispatch failed base=%s; trying again after a pause", self._base.name)
                await wait_for(event, SWEEP_SECONDS)
                if monotonic() - swept >= SWEEP_SECONDS:
                    position, swept = 0, monotonic()
        ending = [*watching, *self._in_flight.values()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

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
        await self._board.refresh()
        await self._runner.apply_gates()

    async def _dispatch_after(self, position: int) -> int:
        """Start every pending sample accepted after ``position``; returns the last position seen."""
        while not self._stopping:
            async with self._database.read() as session:
                operations = await self._ledger.pending_samples(session, self._base.name, after_position=position)
            for operation in operations:
                position = operation.position
                if operation.id not in self._in_flight:
                    task = asyncio.create_task(self._serve(operation), name=f"sample {operation.id}")
                    self._in_flight[operation.id] = task
            if not operations:
                break
        return position

    async def _serve(self, operation: ReadyOperation) -> None:
        try:
            await self._finish(operation, await self._sampled(operation))
        except Exception:
            log.exception("operation=%s kind=%s failed", operation.id, OperationKind.SAMPLE)
            failure = EngineFailure(f"weft failed to run this sample; the service's log has the cause ({operation.id})")
            await self._finish(operation, failure)
        finally:
            self._in_flight.pop(operation.id, None)

    async def _sampled(self, operation: ReadyOperation) -> tuple[SampleOutput, SampleReport] | WeftError:
        if not isinstance(operation.payload, SampleRequest):
            raise TypeError(f"{operation.kind} without a sample request")
        try:
            rules = stop_rules(operation.payload, self._base, self._vocabulary)
            continuation = Continuation(operation.id, operation.payload, rules, cache_salt=operation.tenant)
            return await self._runner.run(operation, continuation)
        except WeftError as error:
            return error

    async def _finish(self, operation: ReadyOperation, outcome: tuple[SampleOutput, SampleReport] | WeftError) -> None:
        """One transaction: the result, its report, and that the sample is no longer in flight."""
        result: Result | WeftError = outcome if isinstance(outcome, WeftError) else outcome[0]
        async with self._database.write() as transaction:
            await self._ledger.complete(transaction, [Completion(operation, result)])
            await leave(transaction, operation.id)
            if not isinstance(outcome, WeftError):
                await record_report(transaction, operation.tenant, operation.id, outcome[1])
            self._ledger.announce_departure(transaction, self._base.name)
