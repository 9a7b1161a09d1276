"""Every Prometheus metric of one process, in a registry of its own.

Metrics are declared here and, by subject, in ``http``, ``training``, ``sampling``, ``queue_waits`` and ``collectors``.
"""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector
from sqlalchemy.pool import Pool

from store.clock import Clock
from telemetry.collectors import (
    BaseModelCollector,
    PoolCollector,
    QueueCollector,
    QueueState,
    ReplicaCollector,
    ReplicaState,
)
from telemetry.housekeeping import HousekeepingCollector, StepState
from telemetry.http import HttpMetrics
from telemetry.sampling import SamplingMetrics
from telemetry.training import TrainingMetrics


class Metrics:
    """The process's metrics, made once and handed to its parts. Used from one event loop.

    Labels have few values by design (``telemetry.labels``): no metric tells one tenant from another.
    """

    def __init__(self, process: str, clock: Clock) -> None:
        """``process`` is the kind of process: serve, api, worker, pool."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("weft_process", "Kind of this process.", registry=registry).info({"process": process})
        self.http = HttpMetrics(registry)
        self.training = TrainingMetrics(registry)
        self.sampling = SamplingMetrics(registry)
        self._operations = Counter(
            "weft_operations_finished",
            "Operations recorded as final. `outcome` is done or an error's code.",
            ("kind", "outcome"),
            registry=registry,
        )
        self._lease_moves = Counter(
            "weft_lease_moves", "Leases of runs or bases that changed hands, by reason.", ("reason",), registry=registry
        )
        self._suspected = Counter(
            "weft_operations_suspected",
            "Operations that a process had in hand when it died, counted by the process that reaped it.",
            registry=registry,
        )
        self._loop_lag = Gauge(
            "weft_event_loop_lag_seconds",
            "Longest time in seconds for which the event loop was blocked lately.",
            registry=registry,
        )
        self._queue, self._pool = QueueCollector(clock), PoolCollector()
        self._replicas = ReplicaCollector()
        self._residents = BaseModelCollector("weft_adapters_resident", "Adapters that are in the trainer's memory.")
        self._micro_batches = BaseModelCollector(
            "weft_pass_most_positions",
            "Most positions of a micro-batch, since one found no memory on the device; 0 while none has.",
        )
        self._housekeeping = HousekeepingCollector(clock)
        by_base = (self._residents, self._micro_batches)
        for collector in (self._queue, self._pool, self._replicas, *by_base, self._housekeeping):
            registry.register(collector)

    def operation_finished(self, kind: str, outcome: str) -> None:
        """Count an operation that became final; ``outcome`` is ``done`` or an error's code."""
        self._operations.labels(kind, outcome).inc()

    def lease_moved(self, reason: str) -> None:
        """Count a lease that changed hands; ``reason`` is one of a few words."""
        self._lease_moves.labels(reason).inc()

    def operations_suspected(self, number: int) -> None:
        """Count operations that a dead process had in hand."""
        self._suspected.inc(number)

    def loop_lagged(self, seconds: float) -> None:
        """Show the event loop's longest recent lag."""
        self._loop_lag.set(seconds)

    def queue_read(self, states: list[QueueState] | None) -> None:
        """Show the queue as just read; None means that the database did not answer."""
        self._queue.put(states)

    def housekeeping_read(self, states: Sequence[StepState] | None) -> None:
        """Show housekeeping's steps as just read; None means that the database did not answer."""
        self._housekeeping.put(states)

    def watch_pool(self, pool: Pool) -> None:
        """Show the database's connection pool from now on."""
        self._pool.watch(pool)

    def watch_replicas(self, base_model: str, replicas: Callable[[], Iterable[ReplicaState]]) -> None:
        """Show the replicas of ``base_model`` that ``replicas()`` returns at each scrape."""
        self._replicas.watch(base_model, replicas)

    def watch_residents(self, base_model: str, count: Callable[[], int]) -> None:
        """Show the number of resident adapters of ``base_model`` that ``count()`` returns at each scrape."""
        self._residents.watch(base_model, count)

    def watch_micro_batches(self, base_model: str, most: Callable[[], int]) -> None:
        """Show the most positions of a micro-batch of ``base_model`` that ``most()`` returns at each scrape, 0 for no bound."""
        self._micro_batches.watch(base_model, most)
