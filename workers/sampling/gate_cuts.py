"""Cuts attempts (tries to draw a sample) that run behind a closed gate, the row that pauses sampling, as its mode says."""

import asyncio
import logging

from contracts.errors import EngineFailure
from telemetry.sampling import SamplingTelemetry
from tenants.gates import Gate, GateMode
from workers.sampling.attempt import Attempt, AttemptState
from workers.sampling.gate_cache import GateCache
from workers.sampling.open_attempts import OpenAttempts

log = logging.getLogger(__name__)


class GateCuts:
    """Cutter of one base model's attempts in one process."""

    def __init__(self, gate_cache: GateCache, attempts: OpenAttempts, telemetry: SamplingTelemetry) -> None:
        self._gate_cache = gate_cache
        self._attempts = attempts
        self._telemetry = telemetry

    async def apply(self) -> None:
        """Refresh the gate cache and cut the attempts behind closed gates. Return once the replicas have confirmed."""
        await self._gate_cache.refresh()
        cuts = []
        for attempt in self._attempts:
            wanted = _state_behind(self._gate_cache.closed_before(attempt.source.run, attempt.operation.tenant))
            if wanted is None or not attempt.may_move(wanted):
                continue
            was_running = attempt.state is AttemptState.RUNNING
            attempt.move(wanted)
            if was_running:
                self._telemetry.cut("gate")
                cuts.append(_cut_requests(attempt))
        await asyncio.gather(*cuts)


def _state_behind(gates: list[Gate]) -> AttemptState | None:
    """Return the state of an attempt behind these closed gates, None when they let it run to its end."""
    modes = {gate.mode for gate in gates}
    if GateMode.ABORT in modes:
        return AttemptState.ABORTED
    return AttemptState.CUT if GateMode.KEEP in modes else None


async def _cut_requests(attempt: Attempt) -> None:
    for request in attempt.requests:
        try:
            await attempt.routed.replica.cut(request.request_id)
        except EngineFailure as failure:
            # The request's stream has ended with the same failure, so the sample goes on elsewhere.
            log.warning("cut not confirmed replica=%s: %s", attempt.routed.name, failure.message)
