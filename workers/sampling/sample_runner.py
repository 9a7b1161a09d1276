"""Runs samples to their end: gate, version, replica, attempt, and again from where it is until every sequence is whole.

A sample is cut by a gate that closes, by a newer version of the run that it follows, or by a replica that fails; it then
goes on with its tokens so far. Cuts are asked for by ``apply_gates`` and ``apply_versions``.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from time import monotonic

from contracts.errors import EngineFailure, StaleSample
from contracts.ids import CheckpointId
from contracts.ledger_records import ReadyOperation
from contracts.operations import SampleOutput
from contracts.sample_report import SampleReport
from ledger.token_feed import TokenFeed
from store.database import Database
from telemetry.sampling import SamplingTelemetry
from tenants.gates import GateMode
from tenants.samplers import OnStale
from workers.sampling.attempts import Patience, run_attempt
from workers.sampling.continuation import Continuation
from workers.sampling.dispatch import Attempt, Dispatcher, Source
from workers.sampling.gate_cache import GateCache
from workers.sampling.router import Router

log = logging.getLogger(__name__)

MOST_RESTARTS = 8
"""Of one sample whose run publishes faster than the sample is drawn."""


@dataclass(slots=True)
class History:
    """What a report tells of a sample. Kept when ``SampleRunner.run`` is asked again after an outage."""

    taken_up: float = field(default_factory=monotonic)
    attempts: int = 0
    replicas: list[str] = field(default_factory=list)
    decode_seconds: float = 0.0
    first_publication: int = 0
    restarts: int = 0
    made_before: int = 0
    """Tokens at the beginning of the attempt, after a restart of the sample."""
    left_at: float | None = None
    """When a newer version cut it, until the next token."""

    def begin(self, attempt: Attempt) -> None:
        """Count an attempt."""
        self.attempts += 1
        if attempt.routed.name not in self.replicas[-1:]:
            self.replicas.append(attempt.routed.name)

    def report(self, continuation: Continuation) -> SampleReport:
        """Of a finished sample."""
        return SampleReport(
            sequences=continuation.reports(),
            replicas=self.replicas,
            attempts=self.attempts,
            queue_seconds=max(0.0, monotonic() - self.taken_up - self.decode_seconds),
            decode_seconds=self.decode_seconds,
        )


class SampleRunner:
    """Runs the samples of one base model that one process has taken up."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        router: Router,
        gate_cache: GateCache,
        database: Database,
        feed: TokenFeed,
        continues_on_new_version: bool,
        telemetry: SamplingTelemetry,
    ) -> None:
        """``continues_on_new_version`` is the swap's policy."""
        self._dispatcher = dispatcher
        self._router = router
        self._gate_cache = gate_cache
        self._database = database
        self._feed = feed
        self._continues_on_new_version = continues_on_new_version
        self._telemetry = telemetry

    async def run(
        self, operation: ReadyOperation, continuation: Continuation, history: History
    ) -> tuple[SampleOutput, SampleReport]:
        """Draw ``continuation`` to its end; being cancelled aborts what runs. After ``Unavailable`` ask again with all three.

        Raises ``InvalidRequest`` for what the caller must change, ``NotFound`` when the adapter is gone, ``StaleSample``, and
        ``EngineFailure`` after failures in a row that brought no new token.
        """
        patience, newer = Patience(), None
        while not continuation.finished:
            attempt = self._dispatcher.go_on(operation, continuation.unfinished, newer) if newer is not None else None
            attempt = attempt or await self._dispatcher.begin(operation, continuation.unfinished)
            if attempt is None:
                continuation.abandon()
                break
            failure = await self._attempt(attempt, continuation, history)
            # Nothing is awaited from here to `go_on`: a gate that closes finds one attempt or the other.
            newer = attempt.follow_up(failure)
            history.left_at = attempt.left_at
            if attempt.is_aborted:
                continuation.abandon()
            elif continuation.finished and attempt.source.staleness is not None:
                # Versions may have come while it ran to its end.
                async with self._database.read() as session:
                    _check_age(continuation, history, await self._dispatcher.source(session, operation))
                newer = None
                if not continuation.finished:
                    continue
            if not continuation.finished:
                if failure is None and not attempt.is_cut:
                    failure = EngineFailure("the replica ended a sequence before its time")
                if failure is not None:
                    self._telemetry.cut("replica")
                    await self._recover(attempt)
                pause = patience.note(failure, made=continuation.made - history.made_before)
                if pause > 0:
                    await asyncio.sleep(pause)
        return continuation.output(), history.report(continuation)

    async def settle(self) -> None:
        """Call once every ``run`` has ended: nothing more is noted as in flight then."""
        await self._dispatcher.settle()

    # --- publishing ---------------------------------------------------------------------------------------------------

    async def withdraw(self, version: CheckpointId) -> None:
        """Have every replica forget a version whose folder is to go; samples that still draw from it end first.

        A vLLM server dies of a listed adapter without a folder.
        """
        while using := [attempt for attempt in self._dispatcher.attempts if attempt.uses(version)]:
            await asyncio.gather(*(attempt.over.wait() for attempt in using))
        for routed in self._router.replicas:
            if version in routed.adapters:
                try:
                    await routed.replica.unload(version)
                except EngineFailure as failure:
                    log.warning("replica=%s could not forget version=%s: %s", routed.name, version, failure.message)

    # --- cutting ---------------------------------------------------------------------------------------------------

    async def apply_gates(self) -> None:
        """Cut what is in flight behind gates that are closed, as their modes say; what is cut already stays so."""
        cuts = []
        for attempt in list(self._dispatcher.attempts):
            modes = {gate.mode for gate in self._gate_cache.before(attempt.source.run)}
            if GateMode.ABORT in modes:
                attempt.is_aborted = True
            if not attempt.is_cut and modes & {GateMode.ABORT, GateMode.KEEP}:
                self._telemetry.cut("gate")
                cuts.append(self._cut(attempt))
        await asyncio.gather(*cuts)

    async def apply_versions(self) -> None:
        """Cut live samples whose run has a newer version, where the policy is to go on with that.

        Nobody counts on the old version's being idle, so the new one need not wait for the end of a step on it.
        """
        if not self._continues_on_new_version:
            return
        for attempt in await self._dispatcher.follow():
            if not attempt.is_cut:
                self._telemetry.cut("version")
                attempt.leave()

    async def _cut(self, attempt: Attempt) -> None:
        attempt.is_cut = True
        for request in attempt.requests:
            try:
                await attempt.routed.replica.cut(request.request_id)
            except EngineFailure as failure:
                # Its stream has ended with the same failure: the sample goes on elsewhere.
                log.warning("cut not confirmed replica=%s: %s", attempt.routed.name, failure.message)

    # --- one attempt -----------------------------------------------------------------------------------------------

    async def _attempt(self, attempt: Attempt, continuation: Continuation, history: History) -> EngineFailure | None:
        """See it through and end it. Returns and raises as ``_work_on``, and ``StaleSample``."""
        began = monotonic()
        history.begin(attempt)
        if history.attempts > 1:
            self._telemetry.continued()
        try:
            _check_age(continuation, history, attempt.source)
            history.made_before = continuation.made
            return await self._work_on(attempt, continuation, history)
        finally:
            self._dispatcher.end(attempt)
            seconds = monotonic() - began
            history.decode_seconds += seconds
            self._telemetry.attempt_done(
                attempt.operation, replica=attempt.routed.name, number=history.attempts, seconds=seconds
            )

    async def _work_on(self, attempt: Attempt, continuation: Continuation, history: History) -> EngineFailure | None:
        """Stream until every request has ended; returns one of the failures that ended any. Raises what is none."""
        # A replica that came back since the choice has forgotten what it was chosen for.
        attempt.routed.note(attempt.source.name, attempt.source.run)
        attempt.requests = continuation.requests(
            attempt.source.version, history.attempts, is_followed=self._feed.is_followed(attempt.key)
        )
        return await run_attempt(
            attempt.routed.replica,
            continuation,
            attempt.requests,
            is_cut=lambda: attempt.is_cut,
            on_news=lambda: self._publish(attempt, continuation, history),
            left=attempt.left,
        )

    async def _recover(self, attempt: Attempt) -> None:
        """A replica has failed the attempt: the sample is not there any more, and the replica perhaps not either."""
        await self._dispatcher.leave(attempt.operation)
        await self._router.check(attempt.routed)

    def _publish(self, attempt: Attempt, continuation: Continuation, history: History) -> None:
        if history.left_at is not None:
            self._telemetry.swapped(monotonic() - history.left_at)
            history.left_at = None
        if self._feed.is_followed(attempt.key):
            self._feed.publish(attempt.key, continuation.news())
        if not attempt.is_noted:
            self._dispatcher.note_move(attempt)


def _check_age(continuation: Continuation, history: History, source: Source) -> None:
    """Forget a sample that has fallen behind ``source`` by more than its sampler allows, or raise ``StaleSample``."""
    if not continuation.made:
        history.first_publication = source.publication
    bound = source.staleness
    lag = source.publication - history.first_publication
    if bound is None or lag <= bound.max_version_lag:
        return
    if bound.on_stale is OnStale.FAIL or history.restarts == MOST_RESTARTS:
        raise StaleSample(
            f"the sample began {lag} versions before the newest one and its sampler allows {bound.max_version_lag}"
            + (f"; it was begun again {history.restarts} times" if history.restarts else "")
        )
    continuation.begin_again()
    history.restarts += 1
    history.first_publication = source.publication
