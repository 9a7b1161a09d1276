"""Set of one process's attempts (tries to draw a sample on a replica) that have not ended, and their load on replicas."""

from collections.abc import Iterator, Sequence

from contracts.ledger_records import ReadyOperation
from workers.sampling.attempt import Attempt, AttemptState
from workers.sampling.gate_cache import GateCache
from workers.sampling.router import Router, affinity_of
from workers.sampling.weight_source import WeightSource


class OpenAttempts:
    """Set of the attempts of one base model in one process that have not ended. Used from one event loop."""

    def __init__(self, router: Router, gate_cache: GateCache) -> None:
        self._router = router
        self._gate_cache = gate_cache
        self._attempts: set[Attempt] = set()

    def __iter__(self) -> Iterator[Attempt]:
        """Iterate over a copy: attempts may start and end meanwhile."""
        return iter(list(self._attempts))

    def start(
        self, operation: ReadyOperation, sequences: int, source: WeightSource, failed_on: Sequence[str] = ()
    ) -> Attempt | None:
        """Choose a replica, count ``sequences`` as its load and add an attempt on it.

        The attempt is added before the sample is in flight, so a gate that closes from now on finds it. Return None
        when a gate before the sample is closed or no replica takes work.
        """
        is_closed = self._gate_cache.closed_before(source.run, operation.tenant)
        routed = None if is_closed else self._router.choose(affinity_of(operation), source.name, failed_on)
        if routed is None:
            return None
        # Counted at once, because the next choice of the same round must see the load.
        self._router.hold(routed, source.name, source.run, sequences)
        attempt = Attempt(operation, source, routed, sequences)
        self._attempts.add(attempt)
        return attempt

    def end(self, attempt: Attempt) -> None:
        """Move the attempt to ``ENDED`` and release its load. Calling it again does nothing."""
        if attempt in self._attempts:
            self._attempts.remove(attempt)
            self._router.release(attempt.routed, attempt.sequences)
            attempt.move(AttemptState.ENDED)
