"""Writes the rows of ``samples_in_flight``: the samples that this process draws now, with their version and replica.

The request to pause a gate is answered once no sample behind that gate has a row.
"""

import asyncio
import logging
from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Unavailable
from contracts.ids import RunId
from contracts.ledger_records import ReadyOperation
from engine.sampling.background_tasks import BackgroundTasks
from ledger.attempts import count_attempts
from ledger.runtime import Runtime
from ledger.wakeups import cleared_samples_topic
from store.batcher import Batcher
from tenants.gates import Dispatch, Entry, clear_in_flight, make_gates, mark_in_flight, update_in_flight
from workers.sampling.attempt import Attempt, AttemptState

log = logging.getLogger(__name__)

_UPDATE_SECONDS = 30.0
"""Longest wait for pending updates at the end of the process."""


class InFlightRows:
    """Writer of the in-flight rows of one base model's samples in one process."""

    def __init__(self, runtime: Runtime, base_model: str, process: str) -> None:
        """Write rows under ``process``, this process's id among the sampling processes."""
        self._database = runtime.database
        self._ledger = runtime.ledger
        self._clock = runtime.clock
        self._base_model = base_model
        self._process = process
        self._updates: Batcher[Attempt, None] = Batcher(self._update)
        self._background = BackgroundTasks()
        self._making: dict[RunId | None, asyncio.Task[None]] = {}

    async def mark(self, transaction: AsyncSession, attempts: Sequence[Attempt]) -> dict[Attempt, Entry]:
        """Mark the attempts' samples as in flight, those whose gates are open. Return each attempt's entry."""
        if not attempts:
            return {}
        entered = await mark_in_flight(transaction, [self._dispatch(attempt) for attempt in attempts], self._clock)
        for attempt, one in zip(attempts, entered, strict=True):
            attempt.cache_clears = one.cache_clears
        return {attempt: one.entry for attempt, one in zip(attempts, entered, strict=True)}

    async def make_gates(self, attempt: Attempt) -> None:
        """Insert the gates that the attempt's sample lacks, in a transaction of their own. One caller does it for each run."""
        run = attempt.source.run
        making = self._making.get(run)
        if making is None:
            making = self._making[run] = asyncio.create_task(self._make_gates(attempt))
            making.add_done_callback(lambda _: self._making.pop(run, None))
        await asyncio.shield(making)

    async def _make_gates(self, attempt: Attempt) -> None:
        async with self._database.write() as transaction:
            await make_gates(transaction, self._dispatch(attempt), self._clock)

    async def clear(self, transaction: AsyncSession, operations: Sequence[ReadyOperation]) -> set[str]:
        """Delete the samples' rows and wake the pauses that wait for them. Return the ids of the operations that had a row."""
        cleared = await clear_in_flight(transaction, [operation.id for operation in operations], self._process)
        if cleared:
            self._ledger.wakeups.announce_after_commit(transaction, cleared_samples_topic(self._base_model))
        return cleared

    async def clear_one(self, operation: ReadyOperation) -> None:
        """Delete the sample's row in a transaction of its own, and wake the pauses that wait for it."""
        async with self._database.write() as transaction:
            await self.clear(transaction, [operation])

    async def clear_after_death(self, operation: ReadyOperation) -> None:
        """Delete the row of a sample whose replica has died, and count an attempt."""
        async with self._database.write() as transaction:
            await count_attempts(transaction, [operation.id])
            await self.clear(transaction, [operation])

    def update_soon(self, attempt: Attempt) -> None:
        """Have the sample's row name the attempt's version and replica, in the background. A missing row stays missing."""
        attempt.is_row_current = True
        self._background.start(self._update_one(attempt))

    async def settle(self) -> None:
        """Wait until no update is pending."""
        await self._background.close(_UPDATE_SECONDS)
        await self._updates.settle()

    async def _update_one(self, attempt: Attempt) -> None:
        try:
            await self._updates.ask(attempt)
        except Unavailable as outage:
            # The row only informs. The sample's next dispatch writes it again.
            log.warning("%s", outage.message)
        except Exception:
            log.exception("operation=%s resumed and its in-flight row was not updated", attempt.operation.id)

    async def _update(self, attempts: Sequence[Attempt]) -> list[None]:
        """Update the rows of attempts that have not ended, in one statement for each version and replica."""
        places: dict[tuple[str | None, str], list[Attempt]] = {}
        for attempt in attempts:
            places.setdefault((attempt.source.name, attempt.routed.name), []).append(attempt)
        for (version, replica), here in places.items():
            if operations := [one.operation.id for one in here if one.state is not AttemptState.ENDED]:
                async with self._database.write_one() as session:
                    await update_in_flight(session, operations, self._process, version=version, replica=replica)
        return [None] * len(attempts)

    def _dispatch(self, attempt: Attempt) -> Dispatch:
        return Dispatch(
            operation=attempt.operation.id,
            tenant=attempt.operation.tenant,
            base_model=self._base_model,
            run=attempt.source.run,
            version=attempt.source.name,
            replica=attempt.routed.name,
            process=self._process,
        )
