"""Every Prometheus metric of one process, in a registry of its own."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector
from sqlalchemy.ext.asyncio import AsyncEngine

from store.clock import Clock
from telemetry.collectors import (
    PoolCollector,
    QueueCollector,
    QueueState,
    ReplicaCollector,
    ReplicaState,
    ResidentCollector,
)
from telemetry.http import HttpMetrics
from telemetry.sampling import SamplingMetrics
from telemetry.training import TrainingMetrics


class Metrics:
    """Made once by whoever composes the process and handed to its parts. Used from one event loop.

    Labels are few by design (``telemetry.labels``): nothing here tells one tenant from another.
    """

    def __init__(self, process: str, clock: Clock) -> None:
        """``process`` says what this one is for: serve, api, worker, pool."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("weft_process", "What this process is for.", registry=registry).info({"process": process})
        self.http = HttpMetrics(registry)
        self.training = TrainingMetrics(registry)
        self.sampling = SamplingMetrics(registry)
        self._operations = Counter(
            "weft_operations_finished",
            "Operations recorded as final; `outcome` is done or an error's code.",
            ("kind", "outcome"),
            registry=registry,
        )
        self._lease_moves = Counter(
            "weft_lease_moves", "Leases of runs or bases that changed hands, by reason.", ("reason",), registry=registry
        )
        self._loop_lag = Gauge(
            "weft_event_loop_lag_seconds",
            "Longest time the event loop stood still, of the last ten.",
            registry=registry,
        )
        self._queue, self._pool = QueueCollector(clock), PoolCollector()
        self._replicas, self._residents = ReplicaCollector(), ResidentCollector()
        for collector in (self._queue, self._pool, self._replicas, self._residents):
            registry.register(collector)

    def operation_finished(self, kind: str, outcome: str) -> None:
        """An operation's row is final; ``outcome`` is ``done`` or an error's code."""
        self._operations.labels(kind, outcome).inc()

    def lease_moved(self, reason: str) -> None:
        """A lease changed hands; ``reason`` is one of a few words."""
        self._lease_moves.labels(reason).inc()

    def loop_lagged(self, seconds: float) -> None:
        """The longest standstill of the event loop lately."""
        self._loop_lag.set(seconds)

    def queue_read(self, states: list[QueueState] | None) -> None:
        """The queue as it is now; None: the database did not answer."""
        self._queue.put(states)

    def watch_database(self, engine: AsyncEngine) -> None:
        """Show the engine's connections from now on."""
        self._pool.watch(engine.pool)

    def watch_replicas(self, base_model: str, replicas: Callable[[], Iterable[ReplicaState]]) -> None:
        """Show what ``replicas`` returns from now on."""
        self._replicas.watch(base_model, replicas)

    def watch_residents(self, base_model: str, count: Callable[[], int]) -> None:
        """Show from now on how many adapters of ``base_model`` are in memory."""
        self._residents.watch(base_model, count)
