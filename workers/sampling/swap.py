"""Swap of a sample to its run's newer weights: leaves the attempt on the old version and resumes the sample on the new one.

Decision 14 (``docs/decisions/0014-a-swap-does-not-wait.md``) says why the swap does not wait for the old weights.
"""

from contracts.ledger_records import ReadyOperation
from ledger.runtime import Runtime
from telemetry.sampling import SamplingTelemetry
from tenants.samplers import SwapPolicy
from workers.sampling.attempt import Attempt, AttemptState
from workers.sampling.open_attempts import OpenAttempts
from workers.sampling.weight_source import WeightSource, WeightSources


class Swap:
    """Swaps of one base model's live samples in one process. Used from one event loop."""

    def __init__(self, runtime: Runtime, attempts: OpenAttempts, telemetry: SamplingTelemetry) -> None:
        self._sources = WeightSources(runtime)
        self._attempts = attempts
        self._telemetry = telemetry
        self._policy = SwapPolicy(runtime.settings.swap_policy)

    async def leave_outdated(self) -> None:
        """Leave every running attempt whose sampler follows a newer version, if its swap policy says so.

        A sample that is drawn in one piece ends on its version. One that was left before it had drawn is left again once it has:
        a run that publishes faster than its samples' prompts are read would else get no token of them.

        No code needs the old version to be idle, so the sample resumes before the replica has aborted the old requests.
        """
        for attempt in await self.find_outdated():
            self._leave(attempt)

    def has_drawn(self, attempt: Attempt) -> None:
        """Note that each sequence of the attempt has a token of it, and leave it if a newer version has come meanwhile."""
        if attempt.is_owed_tokens:
            attempt.is_owed_tokens = False
            self._leave(attempt)

    def _leave(self, attempt: Attempt) -> None:
        if attempt.may_move(AttemptState.LEFT) and not attempt.in_one_piece and self._must_leave(attempt):
            self._telemetry.cut("version")
            attempt.move(AttemptState.LEFT)

    def _must_leave(self, attempt: Attempt) -> bool:
        """Return whether the sample goes on elsewhere: on the newer version, or as its bound says once it is too old."""
        newer = attempt.newer
        if newer is None:
            return False
        is_too_old = newer.staleness is not None and (
            newer.publication - attempt.source.publication > newer.staleness.max_version_lag
        )
        follows = (newer.swap_policy or self._policy) is SwapPolicy.CONTINUE
        return is_too_old or (follows and not attempt.is_owed_tokens)

    async def find_outdated(self) -> list[Attempt]:
        """Set ``newer`` of each open attempt whose sampler follows a newer version, and return those attempts."""
        samplers = [attempt.operation.lane for attempt in self._attempts if attempt.source.is_live]
        if not samplers:
            return []
        followed = await self._sources.followed(samplers)
        outdated = []
        for attempt in self._attempts:
            newer = followed.get(attempt.operation.lane)
            # An attempt that started during the read may draw from a newer version than the read returned.
            if newer is not None and attempt.source.is_live and newer.publication > attempt.source.publication:
                attempt.newer = newer
                outdated.append(attempt)
        return outdated

    def resume(self, operation: ReadyOperation, sequences: int, newer: WeightSource) -> Attempt | None:
        """Start an attempt on ``newer`` for a sample that is in flight and whose attempt was left and has ended.

        The sample stays in flight. Nothing may be awaited between the end of the left attempt and this call. So a gate
        that closes finds the sample's row, and either the left attempt or the new one. Return None when a gate is closed or
        no replica takes work: the sample must then be dispatched.
        """
        attempt = self._attempts.start(operation, sequences, newer)
        if attempt is not None:
            attempt.is_row_current = False
        return attempt
