"""Runs one sample to its end: dispatches it, streams an attempt, and repeats with the tokens so far until all sequences end.

Three things end an attempt early:

- A gate closes (``gate_cuts``): the sample is dispatched again.
- The replica fails: the sample is dispatched again.
- A newer version of the run is published (``swap``): the sample resumes on that version at once.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from contracts.errors import EngineFailure, PoisonOperation, StaleSample
from contracts.ledger_records import ReadyOperation
from contracts.operations import SampleOutput
from contracts.sample_progress import SampleProgress
from contracts.sample_report import SampleReport
from ledger.runtime import Runtime
from telemetry.sampling import SamplingTelemetry
from tenants.samplers import OnStale
from workers.sampling.attempt import Attempt, AttemptState
from workers.sampling.claims import HeldBack, SampleClaims
from workers.sampling.continuation import Continuation
from workers.sampling.dispatch import Dispatcher
from workers.sampling.in_flight_rows import InFlightRows
from workers.sampling.open_attempts import OpenAttempts
from workers.sampling.request_streams import stream_requests
from workers.sampling.retry_patience import RetryPatience
from workers.sampling.router import Router
from workers.sampling.suspect_turns import SuspectTurns
from workers.sampling.swap import Swap
from workers.sampling.token_publisher import TokenPublisher
from workers.sampling.weight_source import WeightSource, WeightSources

MOST_RESTARTS = 8
"""Restarts of one sample after which it fails as stale: its run publishes versions faster than the sample is drawn."""


@dataclass(slots=True)
class History:
    """Facts of a sample's report. The same history is used when ``SampleRunner.run`` is called again after an outage."""

    claimed_at: float = field(default_factory=monotonic)
    """Monotonic seconds."""
    attempts: int = 0
    replicas: list[str] = field(default_factory=list)
    failed_on: list[str] = field(default_factory=list)
    """Replicas on which the last attempts failed, the last one last."""
    deaths: int = 0
    """Replicas that died or hung while they drew the sample."""
    decode_seconds: float = 0.0
    first_publication: int | None = None
    """Publication that the sample's first token was drawn from; None before the first attempt, or if it is not known."""
    restarts: int = 0
    made_before: int = 0
    """Tokens at the beginning of the attempt, counted after a restart."""
    is_owed_tokens: bool = False
    """True if a newer version has cut an attempt before each sequence had a token of it: no later one is cut so early."""
    left_at: float | None = None
    """Monotonic seconds when a newer version cut the sample; None once the next token has come."""

    def begin(self, attempt: Attempt) -> None:
        """Count an attempt."""
        self.attempts += 1
        if attempt.routed.name not in self.replicas[-1:]:
            self.replicas.append(attempt.routed.name)

    def note_failure(self, attempt: Attempt, failure: EngineFailure | None) -> None:
        """Remember the attempt's replica if it failed there, and forget all replicas if it did not fail."""
        self.failed_on = [*(name for name in self.failed_on if name != attempt.routed.name), attempt.routed.name]
        if failure is None:
            self.failed_on = []

    def take_up(self, progress: SampleProgress) -> None:
        """Go on from what another process has saved."""
        self.attempts = progress.report.attempts
        self.replicas = list(progress.report.replicas)
        self.decode_seconds = progress.report.decode_seconds
        self.claimed_at -= progress.report.queue_seconds + progress.report.decode_seconds
        self.first_publication = progress.publication
        self.restarts = progress.restarts

    def report(self, continuation: Continuation) -> SampleReport:
        """Return the report of a finished sample."""
        return SampleReport(
            sequences=continuation.reports(),
            replicas=self.replicas,
            attempts=self.attempts,
            queue_seconds=max(0.0, monotonic() - self.claimed_at - self.decode_seconds),
            decode_seconds=self.decode_seconds,
            scored_version=continuation.scored_version,
        )


class SampleRunner:
    """Runner of the samples of one base model that this process has claimed."""

    def __init__(
        self,
        runtime: Runtime,
        attempts: OpenAttempts,
        rows: InFlightRows,
        dispatcher: Dispatcher,
        swap: Swap,
        claims: SampleClaims,
        router: Router,
        telemetry: SamplingTelemetry,
    ) -> None:
        self._feed = runtime.feed
        self._publisher = TokenPublisher(runtime.feed)
        self._most_attempts = runtime.settings.max_attempts
        self._suspects = SuspectTurns(self._most_attempts)
        self._sources = WeightSources(runtime)
        self._attempts = attempts
        self._rows = rows
        self._dispatcher = dispatcher
        self._swap = swap
        self._claims = claims
        self._router = router
        self._telemetry = telemetry

    async def run(
        self, operation: ReadyOperation, continuation: Continuation, history: History
    ) -> tuple[SampleOutput, SampleReport]:
        """Draw ``continuation`` to its end. Being cancelled aborts what runs.

        Raises ``InvalidRequest`` for a mistake that the caller must correct, ``NotFound`` when the adapter is gone,
        ``StaleSample``, ``EngineFailure`` after too many failures in a row without a new token, and ``HeldBack`` for a sample
        to give back. After ``Unavailable`` the call may be repeated with the same three arguments.
        """
        patience = RetryPatience()
        while not continuation.finished:
            attempts = operation.attempts + history.deaths
            check_attempts(attempts, self._most_attempts)
            try:
                async with self._suspects.turn(attempts, operation.tenant, operation.share):
                    await self._draw(operation, continuation, history, patience, is_suspect=attempts > 0)
            except HeldBack as held:
                if not (attempts and continuation.made):
                    raise
                # A suspect waits without its turn: the other suspects need it.
                with self._claims.waiting(operation):
                    await self._dispatcher.wait(held.gate, operation.tenant)
        return continuation.output(), history.report(continuation)

    async def _draw(
        self,
        operation: ReadyOperation,
        continuation: Continuation,
        history: History,
        patience: RetryPatience,
        *,
        is_suspect: bool,
    ) -> None:
        """Draw the sample to its end, or until a replica dies. Raises as ``run``. A suspect that has to wait is held back."""
        deaths, newer = history.deaths, None
        while not continuation.finished and history.deaths == deaths:
            attempt = self._swap.resume(operation, continuation.unfinished, newer) if newer is not None else None
            if attempt is None:
                # A sample that has tokens waits here for its gate: saving them takes a write.
                may_wait = continuation.made and not is_suspect and self._claims.may_wait
                waiting = partial(self._claims.waiting, operation) if may_wait else None
                attempt = await self._dispatcher.dispatch(
                    operation, continuation.unfinished, waiting=waiting, failed_on=history.failed_on
                )
            if attempt is None:
                continuation.abandon()
                break
            attempt.is_owed_tokens = history.is_owed_tokens
            failure = await self._attempt(attempt, continuation, history)
            # Nothing is awaited between the end of a left attempt and `resume`. So a closing gate finds the old or the new one.
            newer = attempt.resumes_on(failure)
            history.left_at = attempt.left_at
            history.is_owed_tokens |= attempt.before_end is AttemptState.LEFT and not continuation.has_drawn
            if attempt.before_end is AttemptState.ABORTED:
                continuation.abandon()
            elif continuation.finished and attempt.source.staleness is not None:
                # Versions may have been published while the attempt ran to its end.
                _check_age(continuation, history, await self._sources.current(operation))
                newer = None
                if not continuation.finished:
                    continue
            if not continuation.finished:
                await self._follow(attempt, failure, continuation, history, patience)

    async def settle(self) -> None:
        """Wait until no sample is marked or updated in flight any more. Call it once every ``run`` has ended."""
        await self._rows.settle()
        await self._dispatcher.settle()

    async def _follow(
        self,
        attempt: Attempt,
        failure: EngineFailure | None,
        continuation: Continuation,
        history: History,
        patience: RetryPatience,
    ) -> None:
        """Do what an attempt that was not the last one asks for, and pause after a failure. Raises as ``pause_after``."""
        if failure is None and not attempt.is_cut:
            failure = EngineFailure("the replica ended a sequence before its time")
        made = continuation.made - history.made_before
        history.note_failure(attempt, failure)
        if failure is not None:
            self._telemetry.cut("replica")
            attempt.routed.failures += not made
            await self._recover(attempt, history)
        pause = patience.pause_after(failure, made=made)
        if pause > 0:
            await asyncio.sleep(pause)

    async def _attempt(self, attempt: Attempt, continuation: Continuation, history: History) -> EngineFailure | None:
        """Stream the attempt and end it. Return and raise as ``_stream``, and raise ``StaleSample``."""
        began = monotonic()
        history.begin(attempt)
        if history.attempts > 1:
            self._telemetry.continued()
        try:
            _check_age(continuation, history, attempt.source)
            history.made_before = continuation.made
            return await self._stream(attempt, continuation, history)
        finally:
            self._attempts.end(attempt)
            seconds = monotonic() - began
            history.decode_seconds += seconds
            self._telemetry.attempt_done(
                attempt.operation, replica=attempt.routed.name, number=history.attempts, seconds=seconds
            )

    async def _stream(self, attempt: Attempt, continuation: Continuation, history: History) -> EngineFailure | None:
        """Stream the attempt's requests until all have ended. Return the failure of one of them, if any failed."""
        # If the replica came back since it was chosen, the router has forgotten which adapters were asked for there.
        attempt.routed.note(attempt.source.name, attempt.source.run)
        if attempt.cache_clears is not None:
            continuation.cache_clears = attempt.cache_clears
        attempt.requests = continuation.requests(
            attempt.source.version, history.attempts, is_followed=self._feed.is_followed(attempt.key)
        )
        counted = continuation.made

        def on_tokens() -> None:
            nonlocal counted
            made = continuation.made
            drawn, counted = made - counted, made
            if drawn:
                self._router.note_drawing(attempt.routed, is_failing=False)
            self._telemetry.drawn(attempt.operation, drawn)
            self._publish(attempt, continuation, history, drawn)

        return await stream_requests(
            attempt.routed.replica,
            continuation,
            attempt.requests,
            is_cut=lambda: attempt.is_cut,
            on_tokens=on_tokens,
            left=attempt.left,
        )

    async def _recover(self, attempt: Attempt, history: History) -> None:
        """Check the replica of a sample that failed there, and delete the sample's in-flight row.

        If the replica is dead or hangs, an attempt is counted. Raises ``ProcessMustEnd``: the row stays then, and the
        process's end counts the attempt.
        """
        health = await self._router.check(attempt.routed)
        if health.alive and not health.hangs:
            await self._rows.clear_one(attempt.operation)
            return
        await self._rows.clear_after_death(attempt.operation)
        history.deaths += 1

    def _publish(self, attempt: Attempt, continuation: Continuation, history: History, drawn: int) -> None:
        """Hand the ``drawn`` tokens to followers, and finish a swap whose first token has come."""
        if history.left_at is not None:
            self._telemetry.swapped(monotonic() - history.left_at)
            history.left_at = None
        # Tokens of a sample that another process may draw by now would mix with that one's.
        if self._feed.is_followed(attempt.key) and self._claims.heartbeat.may_draw:
            operation = attempt.operation
            self._publisher.publish(
                attempt.key,
                operation.tenant,
                continuation,
                drawn,
                claim=operation.claim,
                publication=history.first_publication,
            )
        if not attempt.is_row_current:
            self._rows.update_soon(attempt)
        if continuation.has_drawn and not continuation.finished:
            self._swap.has_drawn(attempt)


def check_attempts(attempts: int, most: int) -> None:
    """Raise ``PoisonOperation`` for a sample at which ``most`` processes or replicas have died."""
    if attempts >= most:
        raise PoisonOperation(
            f"{attempts} sampling processes or replicas died while they drew this sample; it is not tried again. Change the "
            "request, or ask the operator for the cause"
        )


def _check_age(continuation: Continuation, history: History, source: WeightSource) -> None:
    """Restart a sample that is more versions behind ``source`` than its sampler allows, or raise ``StaleSample``."""
    if not continuation.kept or history.first_publication is None:
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
    continuation.restart()
    history.restarts += 1
    history.first_publication = source.publication
