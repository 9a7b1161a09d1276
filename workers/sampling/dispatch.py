"""Dispatch of samples: each sample waits until its gates (which pause sampling) are open and a replica takes it.

A dispatched sample is marked as in flight. Samples that are dispatched at one moment, as when a version cuts the samples of
a run, share a round with one transaction. The transaction's statements are a large part of weft's work for a sample.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import NotFound, WeftError
from contracts.ledger_records import ReadyOperation
from ledger.runtime import Runtime
from store.batcher import Batcher
from tenants.gates import GateMode
from workers.sampling.attempt import Attempt
from workers.sampling.gate_cache import GateCache
from workers.sampling.in_flight_rows import InFlightRows
from workers.sampling.open_attempts import OpenAttempts
from workers.sampling.router import Router
from workers.sampling.weight_source import WeightSource, WeightSources

REPLICA_WAIT_SECONDS = 300.0
"""Longest wait of a sample for a replica that takes work, while no replica is alive."""


@dataclass(slots=True, eq=False)
class _Question:
    """A sample that asks a round for an attempt."""

    operation: ReadyOperation
    sequences: int
    attempt: Attempt | None = None
    """Attempt that the round has started for the sample."""
    is_cancelled: bool = False
    """True once the caller has stopped waiting for the round."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A round's answer to one sample."""

    source: WeightSource
    attempt: Attempt | None
    """None: the cache knows of a closed gate, or no replica takes work."""
    is_in_flight: bool
    """False with an attempt: the database knows of a closed gate. The attempt has ended."""
    was_in_flight: bool
    """True if the sample had an in-flight row, which the round has deleted."""


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

    async def dispatch(self, operation: ReadyOperation, sequences: int) -> Attempt | None:
        """Wait until the sample may run and a replica takes it, and mark it as in flight. Return its attempt.

        Return None when an ``abort`` gate closed between two attempts of a sample that was in flight. The sample then
        ends with the tokens that it has. Raises ``NotFound`` when the sample's adapter is gone, ``Unavailable`` without a
        database, and ``EngineFailure`` when no replica is alive for ``REPLICA_WAIT_SECONDS``.
        """
        was_in_flight = False
        while True:
            answer = await self._ask(_Question(operation, sequences))
            was_in_flight = was_in_flight or answer.was_in_flight
            attempt, run = answer.attempt, answer.source.run
            if attempt is not None and answer.is_in_flight:
                if attempt.routed.takes_work:
                    return attempt
                # A replica directive came meanwhile.
                self._attempts.end(attempt)
            elif was_in_flight and any(gate.mode is GateMode.ABORT for gate in self._gate_cache.closed_before(run)):
                return None
            elif attempt is not None:
                # The database knows of a closed gate that the cache does not show yet.
                await self._gate_cache.refresh()
            elif self._gate_cache.closed_before(run):
                # The change may be of other gates. The cache tells so from memory, without another round.
                while self._gate_cache.closed_before(run):
                    await self._gate_cache.wait_for_change(run)
            else:
                await self._router.wait_for_one(seconds=REPLICA_WAIT_SECONDS)

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
        """Answer all questions in one transaction. End the attempts that the transaction does not mark as in flight."""
        started: list[Attempt] = []
        in_flight: set[Attempt] = set()
        try:
            async with self._database.write() as transaction:
                # Held: a version that is published after this transaction finds these attempts, and they are left for it.
                sources = await self._sources.hold(transaction, [question.operation for question in questions])
                for question, source in zip(questions, sources, strict=True):
                    question.attempt = self._start(question, source)
                    if question.attempt is not None:
                        started.append(question.attempt)
                marked = await self._rows.mark(transaction, started)
                waiting = [question.operation for question in questions if question.attempt not in marked]
                cleared = await self._rows.clear(transaction, waiting)
            in_flight = marked
        finally:
            for attempt in started:
                if attempt not in in_flight:
                    self._attempts.end(attempt)
        answers: list[_Answer | WeftError] = []
        for question, source in zip(questions, sources, strict=True):
            if isinstance(source, NotFound):
                answers.append(source)
                continue
            if question.is_cancelled and question.attempt is not None:
                self._attempts.end(question.attempt)
            is_in_flight, was_in_flight = question.attempt in in_flight, question.operation.id in cleared
            answers.append(_Answer(source, question.attempt, is_in_flight, was_in_flight))
        return answers

    def _start(self, question: _Question, source: WeightSource | NotFound) -> Attempt | None:
        if isinstance(source, NotFound):
            return None
        return self._attempts.start(question.operation, question.sequences, source)
