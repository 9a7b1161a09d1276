"""Queue waits: the time from an operation's acceptance until its work begins."""

from prometheus_client import CollectorRegistry, Histogram

from contracts.ledger_records import ReadyOperation
from store.clock import Clock
from telemetry.labels import base_label
from telemetry.traces import Traces

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class QueueWaits:
    """Queue waits of one process, by kind and base model."""

    def __init__(self, registry: CollectorRegistry, traces: Traces, clock: Clock) -> None:
        self._traces = traces
        self._clock = clock
        self._seconds = Histogram(
            "weft_queue_wait_seconds",
            "Seconds from an operation's acceptance until its work begins.",
            ("kind", "base"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._children: dict[tuple[str, str], Histogram] = {}

    def ended(self, operation: ReadyOperation, base_model: str) -> None:
        """Record that the operation's wait has ended: its work begins now."""
        if operation.accepted_at is None:
            return
        key = (operation.kind.value, base_model)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = self._seconds.labels(key[0], base_label(base_model))
        found.observe(max(0.0, (self._clock() - operation.accepted_at).total_seconds()))
        self._traces.waited(operation)
