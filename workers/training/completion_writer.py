"""Writes completions (outcomes of training operations) to the ledger in batches, while the next passes compute.

Completions that come while one transaction runs go into the next transaction.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from contracts.errors import LeaseLost
from contracts.ids import RunId
from contracts.ledger_records import Completion
from ledger.runtime import Runtime
from ledger.untold import tell

log = logging.getLogger(__name__)

MAX_BATCH = 256


class CompletionWriter:
    """Writer in the order given. When a run's completion is refused, the run's later completions are dropped unwritten."""

    def __init__(self, runtime: Runtime) -> None:
        self._database = runtime.database
        self._ledger = runtime.ledger
        self._wakeups = runtime.wakeups
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
        """Wait until no completion of the run (None: of any run) is queued or being written."""
        async with self._idle:
            await self._idle.wait_for(lambda: not self._outstanding(run))

    def close(self) -> None:
        """Have ``run`` end once everything given is written."""
        self._closing = True
        self._added.set()

    async def run(self, *, on_written: Callable[[Completion], None], on_refused: Callable[[RunId], None]) -> None:
        """Write until ``close``.

        ``on_written`` is called for each completion that is in the ledger now. ``on_refused`` is called for each run with a
        completion that could not be written: from then on the run's memory is ahead of the ledger.
        """
        while self._queue or not self._closing:
            self._added.clear()
            self._writing, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
            if self._writing:
                await self._write(self._writing, on_written, on_refused)
            self._writing = []
            async with self._idle:
                self._idle.notify_all()
            if not self._queue and not self._closing:
                await self._added.wait()

    async def _write(
        self, batch: Sequence[Completion], on_written: Callable[[Completion], None], on_refused: Callable[[RunId], None]
    ) -> None:
        """Write the batch in one transaction, or else each run's part in a transaction of its own."""
        try:
            async with self._database.write() as transaction:
                await self._ledger.complete(transaction, batch)
        except LeaseLost as lost:
            log.warning("completions are not written operations=%d: %s", len(batch), lost.message)
        except Exception:
            log.exception("completions could not be written operations=%d", len(batch))
        else:
            for completion in batch:
                on_written(completion)
            return
        by_run: dict[RunId, list[Completion]] = {}
        for completion in batch:
            by_run.setdefault(RunId(completion.operation.lane), []).append(completion)
        for run, completions in by_run.items():
            if len(by_run) > 1:
                # A completion that can never be written must not block the completions of other runs.
                await self._write(completions, on_written, on_refused)
                continue
            log.error("run=%s is dropped from memory; it is rebuilt from the ledger", run)
            # They may have been written: the answer of the COMMIT may be lost.
            tell(self._wakeups, [completion.operation.id for completion in completions])
            self._queue = [one for one in self._queue if one.operation.lane != run]
            on_refused(run)

    def _outstanding(self, run: RunId | None) -> bool:
        return any(run is None or one.operation.lane == run for one in (*self._writing, *self._queue))
