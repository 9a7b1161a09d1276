"""Dispatch of samples: each sample waits until its gates (which pause sampling) are open and a replica takes it.

A dispatched sample is marked as in flight. Samples that are dispatched at one moment, as when a version cuts the samples of
a run, share a round with one transaction. The transaction's statements are a large part of weft's work for a sample.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from contracts.errors import NotFound, WeftError
from contracts.ids import RunId, TenantId
from contracts.ledger_records import ReadyOperation
from ledger.runtime import Runtime
from store.batcher import Batcher
from tenants.gates import Entry, GateMode
from workers.sampling.attempt import Attempt
from workers.sampling.claims import HeldBack
from workers.sampling.gate_cache import GateCache
from workers.sampling.in_flight_rows import InFlightRows
from workers.sampling.open_attempts import OpenAttempts
from workers.sampling.router import Router
from workers.sampling.weight_source import WeightSource, WeightSources

_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 1.0
Waiting = Callable[[], AbstractContextManager[None]]
"""Block in which a sample waits."""


@dataclass(slots=True, eq=False)
class _Question:
    """A sample that asks a round for an attempt."""

    operation: ReadyOperation
    sequences: int
    failed_on: Sequence[str] = ()
    """See ``Router.choose``."""
    attempt: Attempt | None = None
    """Attempt that the round has started for the sample."""
    is_cancelled: bool = False
    """True once the caller has stopped waiting for the round."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A round's answer to one sample."""

    entry: Entry | None
    """None: the cache knows of a closed gate, or no replica takes work."""
    was_in_flight: bool
    """True if the sample had an in-flight row, which the round has deleted."""
    run: RunId | None = None
    """Run that the sample draws from, unless the entry is ``LOCKED``."""
    attempt: Attempt | None = None
    """Attempt that the round has started. It has ended unless the entry is ``IN_FLIGHT``."""


class Dispatcher:
    """Dispatcher of one base model's samples in one process. Used from one event loop."""

    def __init__(
        self, runtime: Runtime, attempts: OpenAttempts, rows: InFlightRows, router: Router, gate_cache: GateCache
    ) -> None:
        self._database = runtime.database
        self._sources = WeightSources(runtime)
        self._attempts = attempts
        self._rows = rows
        self._router = router
        self._gate_cache = gate_cache
        self._rounds: Batcher[_Question, _Answer] = Batcher(self._round)

    async def dispatch(
        self,
        operation: ReadyOperation,
        sequences: int,
        *,
        waiting: Waiting | None = None,
        failed_on: Sequence[str] = (),
    ) -> Attempt | None:
        """Mark the sample as in flight on a replica that takes it, and return its attempt.

        ``failed_on``: replicas on which its last attempts failed, see ``Router.choose``.
        A sample behind a closed gate waits inside ``waiting()``. Without ``waiting`` it does not wait: ``HeldBack`` is raised.

        Return None when an ``abort`` gate closed between two attempts of a sample that was in flight. The sample then
        ends with the tokens that it has. Raises ``NotFound`` when the sample's adapter is gone, ``Unavailable`` without a
        database, and ``HeldBack`` also when no replica takes work: another process may have one that does.
        """
        was_in_flight, pause = False, _FIRST_PAUSE_SECONDS
        while True:
            answer = await self._ask(_Question(operation, sequences, failed_on))
            was_in_flight = was_in_flight or answer.was_in_flight
            attempt, run = answer.attempt, answer.run
            if answer.entry is Entry.LOCKED:
                # Asked again rather than waited for: a round answers samples of all tenants.
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            elif attempt is not None and answer.entry is Entry.IN_FLIGHT:
                if attempt.routed.takes_work:
                    return attempt
                # A replica directive came meanwhile.
                self._attempts.end(attempt)
            elif attempt is not None and answer.entry is Entry.MISSING:
                await self._rows.make_gates(attempt)
            elif was_in_flight and any(gate.mode is GateMode.ABORT for gate in self._gate_cache.closed_before(run)):
                return None
            elif attempt is not None:
                # The database knows of a closed gate that the cache does not show yet.
                await self._gate_cache.refresh()
            elif waiting is None:
                raise HeldBack(run if run is not None and self._gate_cache.is_closed(run) else None)
            else:
                with waiting():
                    await self.wait(run, operation.tenant)

    async def wait(self, run: RunId | None, tenant: TenantId) -> None:
        """Wait until the tenant's gates before ``run`` are open. Raises ``HeldBack`` if no replica takes work."""
        if not self._router.takes_work:
            raise HeldBack
        while self._gate_cache.closed_before(run, tenant):
            # The change may be of other gates. The cache tells so from memory, without another round.
            await self._gate_cache.wait_for_change(run, tenant)

    async def settle(self) -> None:
        """Wait until no round runs: a round continues although its callers are cancelled."""
        await self._rounds.settle()

    async def _ask(self, question: _Question) -> _Answer:
        try:
            return await self._rounds.ask(question)
        except asyncio.CancelledError:
            question.is_cancelled = True
            if question.attempt is not None:
                self._attempts.end(question.attempt)
            raise

    async def _round(self, questions: Sequence[_Question]) -> list[_Answer | WeftError]:
        """Answer all questions in one transaction, which waits for no lock of a tenant.

        End the attempts that the transaction does not mark as in flight.
        """
        started: list[Attempt] = []
        entries: dict[Attempt, Entry] = {}
        is_done = False
        try:
            async with self._database.write() as transaction:
                # Held: a version that is published after this transaction finds these attempts, and they are left for it.
                sources = await self._sources.hold(transaction, [question.operation for question in questions])
                for question, source in zip(questions, sources, strict=True):
                    question.attempt = self._start(question, source)
                    if question.attempt is not None:
                        started.append(question.attempt)
                entries = await self._rows.mark(transaction, started)
                marked = {attempt for attempt, entry in entries.items() if entry is Entry.IN_FLIGHT}
                waiting = [question.operation for question in questions if question.attempt not in marked]
                cleared = await self._rows.clear(transaction, waiting)
            await self._clear_cancelled(question for question in questions if question.attempt in marked)
            is_done = True
        finally:
            for attempt in started:
                if not is_done or entries.get(attempt) is not Entry.IN_FLIGHT:
                    self._attempts.end(attempt)
        return [
            self._answer(question, source, entries, was_in_flight=question.operation.id in cleared)
            for question, source in zip(questions, sources, strict=True)
        ]

    async def _clear_cancelled(self, marked: Iterable[_Question]) -> None:
        """Delete the rows of samples that their callers have given up: a caller may have deleted its row before the commit."""
        given_up = [question.operation for question in marked if question.is_cancelled]
        if given_up:
            async with self._database.write() as transaction:
                await self._rows.clear(transaction, given_up)

    def _answer(
        self,
        question: _Question,
        source: WeightSource | NotFound | None,
        entries: Mapping[Attempt, Entry],
        *,
        was_in_flight: bool,
    ) -> _Answer | WeftError:
        if isinstance(source, NotFound):
            return source
        if source is None:
            return _Answer(Entry.LOCKED, was_in_flight)
        if question.attempt is None:
            return _Answer(None, was_in_flight, source.run)
        if question.is_cancelled:
            self._attempts.end(question.attempt)
        return _Answer(entries[question.attempt], was_in_flight, source.run, question.attempt)

    def _start(self, question: _Question, source: WeightSource | NotFound | None) -> Attempt | None:
        if not isinstance(source, WeightSource):
            return None
        return self._attempts.start(question.operation, question.sequences, source, question.failed_on)
