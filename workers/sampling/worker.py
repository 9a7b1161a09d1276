"""The sampler's loop: pending samples in, replica requests out, outcomes into the ledger.

A sample keeps no order with others. One that is cut by the end of the process stays pending and is sampled again.
"""

import asyncio
import logging

from engine.contracts.base_model import BaseModelFacts
from engine.contracts.errors import EngineFailure, WeftError
from engine.contracts.operations import OperationKind, Result, SampleRequest
from engine.sampling.replica import AdapterVersion, SamplerReplica
from engine.sampling.vocabulary import BaseVocabulary
from tenants.checkpoints import get_checkpoint
from tenants.clock import Clock
from tenants.data_folder import DataFolder
from tenants.database import Database
from tenants.samplers import get_sampler
from workers.ledger.ledger import Ledger
from workers.ledger.operations import Completion, ReadyOperation
from workers.ledger.wakeups import Wakeups, sampling_topic, wait_for
from workers.sampling.attempts import run_sample
from workers.sampling.continuation import Continuation
from workers.sampling.sample_request import stop_rules

log = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
"""Longest time without a look at the ledger: the net below lost wake-ups."""


class SamplingWorker:
    """Serves every sample of one base model through one replica."""

    def __init__(
        self,
        *,
        base: BaseModelFacts,
        vocabulary: BaseVocabulary,
        replica: SamplerReplica,
        database: Database,
        ledger: Ledger,
        wakeups: Wakeups,
        data_folder: DataFolder,
        clock: Clock,
    ) -> None:
        self._base = base
        self._vocabulary = vocabulary
        self._replica = replica
        self._database = database
        self._ledger = ledger
        self._wakeups = wakeups
        self._data_folder = data_folder
        self._clock = clock
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    async def run(self) -> None:
        """Work until ``stop``; samples in flight are then left to the next process."""
        position = 0
        with self._wakeups.listen(sampling_topic(self._base.name)) as event:
            while not self._stopping:
                event.clear()
                try:
                    position = await self._dispatch_after(position)
                except Exception:
                    log.exception("sampling dispatch failed base=%s; trying again after a pause", self._base.name)
                if not await wait_for(event, SWEEP_SECONDS):
                    position = 0
        for task in list(self._in_flight.values()):
            task.cancel()
        await asyncio.gather(*self._in_flight.values(), return_exceptions=True)

    def stop(self) -> None:
        """End; nothing accepted is lost."""
        self._stopping = True
        self._wakeups.announce(sampling_topic(self._base.name))

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
            outcome: Result | WeftError
            try:
                outcome = await self._sample(operation)
            except WeftError as error:
                outcome = error
            async with self._database.write() as transaction:
                await self._ledger.complete(transaction, [Completion(operation, outcome)])
        except Exception:
            log.exception("operation=%s kind=%s failed", operation.id, OperationKind.SAMPLE)
            failure = EngineFailure(f"weft failed to run this sample; the service's log has the cause ({operation.id})")
            async with self._database.write() as transaction:
                await self._ledger.complete(transaction, [Completion(operation, failure)])
        finally:
            self._in_flight.pop(operation.id, None)

    async def _sample(self, operation: ReadyOperation) -> Result:
        if not isinstance(operation.payload, SampleRequest):
            raise TypeError(f"{operation.kind} without a sample request")
        rules = stop_rules(operation.payload, self._base, self._vocabulary)
        continuation = Continuation(operation.id, operation.payload, rules, cache_salt=operation.tenant)
        return await run_sample(self._replica, continuation, await self._resolve(operation))

    async def _resolve(self, operation: ReadyOperation) -> AdapterVersion | None:
        """The version to sample now: the pinned one, a live sampler's newest, or None for the bare base."""
        async with self._database.read() as session:
            sampler = await get_sampler(session, operation.tenant, operation.lane)
            if sampler.checkpoint_id is None:
                return None
            checkpoint = await get_checkpoint(session, operation.tenant, sampler.checkpoint_id, self._clock)
        return AdapterVersion(name=checkpoint.id, directory=self._data_folder.path(checkpoint.directory))
