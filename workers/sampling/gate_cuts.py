"""Cuts attempts (tries to draw a sample) that run behind a closed gate, the row that pauses sampling, as its mode says."""

import asyncio
import logging

from contracts.errors import EngineFailure
from engine.sampling.replica import GenerateRequest
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
        self._cutting: set[asyncio.Task[None]] = set()

    async def apply(self) -> None:
        """Refresh the gate cache and begin to cut the attempts behind closed gates.

        Nothing waits for a replica to confirm a cut, since other gates close meanwhile: a pause waits for its samples to leave
        flight. An attempt is cut once, and its states follow the order in which its gates change.
        """
        await self._gate_cache.refresh()
        for attempt in self._attempts:
            wanted = _state_behind(self._gate_cache.closed_before(attempt.source.run, attempt.operation.tenant))
            if wanted is None or not attempt.may_move(wanted):
                continue
            was_running = attempt.state is AttemptState.RUNNING
            attempt.move(wanted)
            if was_running:
                self._telemetry.cut("gate")
                cutting = asyncio.create_task(_cut(attempt), name=f"cut {attempt.operation.id}")
                self._cutting.add(cutting)
                cutting.add_done_callback(self._ended)

    async def close(self) -> None:
        """Give up the cuts that replicas have not confirmed."""
        cutting = list(self._cutting)
        for task in cutting:
            task.cancel()
        await asyncio.gather(*cutting, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._cutting.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=failure)


def _state_behind(gates: list[Gate]) -> AttemptState | None:
    """Return the state of an attempt behind these closed gates, None when they let it run to its end."""
    modes = {gate.mode for gate in gates}
    if GateMode.ABORT in modes:
        return AttemptState.ABORTED
    return AttemptState.CUT if GateMode.KEEP in modes else None


async def _cut(attempt: Attempt) -> None:
    """Cut all requests of the attempt together: after an earlier cut each of its sequences has one of its own."""
    await asyncio.gather(*(_cut_request(attempt, request) for request in attempt.requests))


async def _cut_request(attempt: Attempt, request: GenerateRequest) -> None:
    try:
        await attempt.routed.replica.cut(request.request_id)
    except EngineFailure as failure:
        # The request's stream has ended with the same failure, so the sample goes on elsewhere.
        log.warning("cut not confirmed replica=%s: %s", attempt.routed.name, failure.message)
