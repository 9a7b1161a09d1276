"""Writes completions beside the computing, in batches: whatever came while a transaction ran goes into the next one."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from contracts.errors import LeaseLost
from contracts.ids import RunId
from contracts.ledger_records import Completion
from ledger.ledger import Ledger
from store.database import Database

log = logging.getLogger(__name__)

MAX_BATCH = 256


class CompletionWriter:
    """One task that writes, in the order given. A lane's completions are written in order or, from one on, not at all."""

    def __init__(
        self,
        *,
        database: Database,
        ledger: Ledger,
        on_written: Callable[[Completion], None],
        on_lost: Callable[[RunId], None],
    ) -> None:
        """``on_lost`` names a run whose completions could not be written: its memory is ahead of the ledger for ever."""
        self._database = database
        self._ledger = ledger
        self._on_written = on_written
        self._on_lost = on_lost
        self._queue: list[Completion] = []
        self._writing: list[Completion] = []
        self._added = asyncio.Event()
        self._idle = asyncio.Condition()
        self._closing = False

    def put(self, completions: Sequence[Completion]) -> None:
        """Have the completions written soon."""
        if completions:
            self._queue += completions
            self._added.set()

    async def drain(self, run: RunId | None = None) -> None:
        """Wait until nothing of the run, or nothing at all, is on its way."""
        async with self._idle:
            await self._idle.wait_for(lambda: not self._outstanding(run))

    def close(self) -> None:
        """End once everything given is written."""
        self._closing = True
        self._added.set()

    async def run(self) -> None:
        """Write until ``close``."""
        while self._queue or not self._closing:
            self._added.clear()
            self._writing, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
            if self._writing:
                await self._write(self._writing)
            self._writing = []
            async with self._idle:
                self._idle.notify_all()
            if not self._queue and not self._closing:
                await self._added.wait()

    async def _write(self, batch: Sequence[Completion]) -> None:
        try:
            async with self._database.write() as transaction:
                await self._ledger.complete(transaction, batch)
        except LeaseLost as lost:
            log.warning("completions are not written operations=%d: %s", len(batch), lost.message)
        except Exception:
            log.exception("completions could not be written operations=%d", len(batch))
        else:
            for completion in batch:
                self._on_written(completion)
            return
        by_run: dict[RunId, list[Completion]] = {}
        for completion in batch:
            by_run.setdefault(RunId(completion.operation.lane), []).append(completion)
        for run, completions in by_run.items():
            if len(by_run) > 1:
                # One that can never be written must not take others' down with it.
                await self._write(completions)
                continue
            log.error("run=%s is lost from memory; it is rebuilt from the ledger", run)
            self._queue = [one for one in self._queue if one.operation.lane != run]
            self._on_lost(run)

    def _outstanding(self, run: RunId | None) -> bool:
        return any(run is None or one.operation.lane == run for one in (*self._writing, *self._queue))
