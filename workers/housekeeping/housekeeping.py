"""Housekeeping of one process: runs each step by itself, a batch after another, for a bounded time."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import monotonic

from contracts.errors import WeftError
from ledger.runtime import Runtime
from store.repeat import repeat
from workers.housekeeping.records import StepRecord, read_record, write_record
from workers.housekeeping.schedule import StepName, interval
from workers.housekeeping.steps import HousekeepingSteps

log = logging.getLogger(__name__)

RUN_SECONDS = 0.8
"""Seconds after which a run begins no further batch. What is left waits for the next run, which follows soon."""
TASK_SECONDS = 20.0
"""Seconds after which a task begins no further run of its step."""
_LONG_TASKS = {StepName.DIGEST_AUDIT: 200.0}
"""Seconds instead for a step whose work only the same process can go on with: the next task may be another's."""
BEHIND_SECONDS = 1.0
"""Seconds until the next run of a step that has work left over."""
BATCH_SECONDS = 120.0
"""Longest time of one batch, its folders included."""
_RECORDED_AGAIN = timedelta(minutes=1)
"""Time between two records of a step that finds nothing to do, in a service of one process."""


class Housekeeping:
    """Runs the steps of one service. Several processes may: each statement leaves what another has done."""

    def __init__(self, runtime: Runtime, may_declare_dead: Callable[[], bool]) -> None:
        """See ``HousekeepingSteps`` for ``may_declare_dead``."""
        self._runtime = runtime
        self._steps = HousekeepingSteps(runtime, may_declare_dead)
        self._stopping = asyncio.Event()
        self._behind: set[StepName] = set()

    async def run(self) -> None:
        """Run every step in its interval until ``stop``, each in a loop of its own: none waits for another's failure."""
        await asyncio.gather(*(self._keep_running(step) for step in StepName))

    async def _keep_running(self, step: StepName) -> None:
        every = interval(step, self._runtime.settings).total_seconds()

        def pause() -> float:
            return BEHIND_SECONDS if step in self._behind else every

        failed = f"housekeeping step {step} failed"
        await repeat(partial(self.run_step, step), seconds=pause, stopping=self._stopping, failed=failed)

    def stop(self) -> None:
        """End ``run`` after the batches in hand."""
        self._stopping.set()

    async def sweep(
        self, steps: Iterable[StepName] = tuple(StepName), *, until_done: bool = False
    ) -> dict[StepName, StepRecord | BaseException]:
        """Run the steps, one after another. Return each step's record, or its failure.

        With ``until_done`` each step goes on until it has nothing left, else for one run.
        """
        outcomes: dict[StepName, StepRecord | BaseException] = {}
        for step in steps:
            run = self._run_until_done(step) if until_done else self.run_step(step)
            (outcomes[step],) = await asyncio.gather(run, return_exceptions=True)
        return outcomes

    async def _run_until_done(self, step: StepName, most_seconds: float = float("inf")) -> StepRecord:
        """Run the step again and again; return a record of all the runs together."""
        started, record = monotonic(), await self.run_step(step)
        handled = record.handled
        while record.position is not None and monotonic() - started < most_seconds:
            record = await self.run_step(step)
            handled += record.handled
        return replace(record, handled=handled, seconds=monotonic() - started)

    async def run_if_due(self, step: StepName) -> None:
        """Run one step as a task: not if some process ran it just now, and until nothing is left or its time is over.

        Raises what the step raises.
        """
        before = await self._last(step)
        if before is not None and before.position is None and before.failing_since is None:
            now = self._runtime.clock()
            # A run that lies ahead is told by a clock that was set back: it says nothing.
            if now - interval(step, self._runtime.settings) / 2 < before.ended_at <= now:
                return
        await self._run_until_done(step, _LONG_TASKS.get(step, TASK_SECONDS))

    async def run_step(self, step: StepName) -> StepRecord:
        """Run one step for about ``RUN_SECONDS`` and record it. Raises what the step raises; the record then says so."""
        before = await self._last(step)
        place = before.position if before is not None else None
        started, handled, is_done = monotonic(), 0, False
        try:
            while not is_done:
                async with asyncio.timeout(BATCH_SECONDS):
                    batch = await self._steps.by_name[step].work(place)
                handled, place = handled + batch.handled, batch.next
                is_done = place is None or monotonic() - started >= RUN_SECONDS
        finally:
            record = self._record(before, place, handled=handled, seconds=monotonic() - started, has_failed=not is_done)
            with suppress(WeftError, TimeoutError):
                await self._write(step, before, record)
        if handled:
            log.info(
                "housekeeping step=%s rows=%d seconds=%.2f left_over=%s", step, handled, record.seconds, bool(place)
            )
        return record

    async def _last(self, step: StepName) -> StepRecord | None:
        async with self._runtime.database.read() as session:
            return await read_record(session, step)

    def _record(
        self, before: StepRecord | None, place: str | None, *, handled: int, seconds: float, has_failed: bool
    ) -> StepRecord:
        now = self._runtime.clock()
        last_success = None if before is None else before.succeeded_at
        return StepRecord(
            ended_at=now,
            succeeded_at=now if not has_failed else last_success,
            seconds=seconds,
            handled=handled,
            position=place,
            behind_since=((before and before.behind_since) or now) if place is not None else None,
            failing_since=((before and before.failing_since) or now) if has_failed else None,
        )

    async def _write(self, step: StepName, before: StepRecord | None, record: StepRecord) -> None:
        """Write the record. A service of one process that finds nothing to do writes seldom."""
        (self._behind.add if record.position is not None else self._behind.discard)(step)
        was_quiet = before is not None and before.position is None and before.failing_since is None
        is_quiet = record.handled == 0 and record.position is None and record.failing_since is None
        is_recent = before is not None and record.ended_at - before.ended_at < _RECORDED_AGAIN
        if self._runtime.database.has_one_service and was_quiet and is_quiet and is_recent:
            return
        async with self._runtime.database.write_one() as session:
            await write_record(session, step, record)
