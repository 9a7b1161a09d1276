"""Writes completions (outcomes of training operations) to the ledger in batches, while the next passes compute.

Completions that come while one transaction runs go into the next transaction.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from contracts.errors import LeaseLost, WeftError
from contracts.ids import RunId
from contracts.ledger_records import Completion
from ledger.runtime import Runtime
from ledger.untold import wake_pollers
from workers.training.refusals import Refusals, unrecorded

log = logging.getLogger(__name__)

MAX_BATCH = 256


class CompletionWriter:
    """Writer in the order given. When a run's completion is refused, the run's later completions are dropped unwritten.

    An operation whose outcome is refused again and again, and for no outage, fails.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._database = runtime.database
        self._ledger = runtime.ledger
        self._wakeups = runtime.wakeups
        self._queue: list[Completion] = []
        self._writing: list[Completion] = []
        self._added = asyncio.Event()
        self._idle = asyncio.Condition()
        self._closing = False
        self._refusals = Refusals()

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
        failure = await self._failure_of(batch, on_written)
        if failure is None:
            return
        by_run: dict[RunId, list[Completion]] = {}
        for completion in batch:
            by_run.setdefault(RunId(completion.operation.lane), []).append(completion)
        if len(by_run) > 1:
            # A completion that can never be written must not block the completions of other runs.
            for completions in by_run.values():
                await self._write(completions, on_written, on_refused)
            return
        left = list(batch)
        if len(left) > 1 and _is_refusal(failure):
            # One by one: those before the refused one are written.
            while left and (failure := await self._failure_of(left[:1], on_written)) is None:
                left = left[1:]
        if failure is None:
            return
        if _is_refusal(failure) and self._refusals.is_last(left[0].operation):
            # It would be computed and refused for ever.
            await self._failure_of([Completion(left[0].operation, unrecorded(left[0].operation))])
        for run in by_run:
            log.error("run=%s is dropped from memory; it is rebuilt from the ledger", run)
            # They may have been written: the answer of the COMMIT may be lost.
            wake_pollers(self._wakeups, [completion.operation.id for completion in left])
            self._queue = [one for one in self._queue if one.operation.lane != run]
            on_refused(run)

    async def _failure_of(
        self, batch: Sequence[Completion], on_written: Callable[[Completion], None] | None = None
    ) -> Exception | None:
        """Write the batch in one transaction. Return the error, if it was not written."""
        try:
            async with self._database.write() as transaction:
                await self._ledger.complete(transaction, batch)
        except LeaseLost as lost:
            log.warning("completions are not written operations=%d: %s", len(batch), lost.message)
            return lost
        except Exception as error:
            log.exception("completions could not be written operations=%d", len(batch))
            return error
        for completion in batch:
            self._refusals.forget(completion.operation)
            if on_written is not None:
                on_written(completion)
        return None

    def _outstanding(self, run: RunId | None) -> bool:
        return any(run is None or one.operation.lane == run for one in (*self._writing, *self._queue))


def _is_refusal(failure: Exception | None) -> bool:
    """Return whether the database has refused what was to be written: it answers, and the lease is valid."""
    return failure is not None and not isinstance(failure, WeftError)
