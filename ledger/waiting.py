"""Explains why operations wait: one answer for polls, for weft's own routes and for operators."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId
from contracts.operations import OperationKind
from contracts.waiting import Ahead, Wait
from ledger.sample_waits import wait_of_sample
from ledger.training_waits import wait_of_training
from ledger.wait_ahead import QueueSums, work_ahead
from ledger.wait_facts import WaitFacts, read_facts
from ledger.work_in_hand import read_record
from store.batcher import Batcher
from store.clock import Clock
from store.data_folder import DataFolder
from store.database import Database
from store.settings import Settings
from tenants.limits import Limits

_READ_SECONDS = 0.5
"""Longest wait for the trainers' records of the work in hand."""


class Waits:
    """Reasons of pending operations. Polls that end together share the statements."""

    def __init__(self, database: Database, settings: Settings, data_folder: DataFolder, clock: Clock) -> None:
        """``clock`` tells the database's time."""
        self._database = database
        self._settings = settings
        self._defaults = Limits.of(settings)
        self._data_folder = data_folder
        self._clock = clock
        self._batcher: Batcher[RequestId, Wait | None] = Batcher(self._answer)
        self._sums = QueueSums()
        # A thread of its own: others' may be busy with files for long.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="waits")

    def now(self) -> datetime:
        """Return the time that reasons are told for."""
        return self._clock()

    async def of(self, operation: RequestId) -> Wait | None:
        """Return why the operation waits, None if it has ended; calls of one moment share the statements."""
        return await self._batcher.ask(operation)

    async def of_all(self, session: AsyncSession, operations: Sequence[RequestId]) -> dict[RequestId, Wait]:
        """Return why each of the operations waits, leaving out those that have ended."""
        if not operations:
            return {}
        found = await read_facts(
            session, operations, settings=self._settings, defaults=self._defaults, now=self._clock()
        )
        facts = replace(found, in_hand=await self._in_hand(found))
        return {RequestId(row.id): self._wait(row, facts) for row in facts.rows}

    async def ahead(self, session: AsyncSession, operation: RequestId, wait: Wait) -> Ahead | None:
        """Return what is before the operation, None where no turn is waited for; calls of one second share the sums."""
        return await work_ahead(session, operation, wait, self._sums, now=self._clock())

    async def _answer(self, operations: Sequence[RequestId]) -> list[Wait | None]:
        async with self._database.read() as session:
            found = await self.of_all(session, operations)
        return [found.get(operation) for operation in operations]

    async def _in_hand(self, facts: WaitFacts) -> set[RequestId]:
        trainers = {row.trainer_id for row in facts.rows if row.trainer_id is not None}
        if not trainers:
            return set()
        reading = asyncio.get_running_loop().run_in_executor(
            self._reader, lambda: {one for trainer in trainers for one in read_record(self._data_folder, trainer)}
        )
        try:
            return await asyncio.wait_for(reading, _READ_SECONDS)
        except TimeoutError:
            # The reason is a little less exact; no poll waits for a disk.
            return set()

    def _wait(self, row: Row[Any], facts: WaitFacts) -> Wait:
        if row.kind == OperationKind.SAMPLE:
            return wait_of_sample(row, facts)
        return wait_of_training(row, facts, self._settings)
