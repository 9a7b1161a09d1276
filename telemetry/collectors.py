"""Prometheus collectors: figures that are read from their owners at each scrape. Scrapes do no I/O."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy.pool import Pool, QueuePool

from store.clock import Clock
from telemetry.labels import base_label, replica_label


class ReplicaState(Protocol):
    """State of a replica, as the router knows it."""

    sequences: int
    is_draining: bool
    is_asleep: bool | None

    @property
    def works(self) -> bool:
        """True if the replica answers and is not known to draw nothing."""
        ...

    @property
    def name(self) -> str:
        """Name of the replica, unique within its base model."""
        ...


class ReplicaCollector(Collector):
    """Health and load of every replica to which this process sends samples."""

    def __init__(self) -> None:
        self._sources: list[tuple[str, Callable[[], Iterable[ReplicaState]]]] = []

    def watch(self, base_model: str, replicas: Callable[[], Iterable[ReplicaState]]) -> None:
        """Show the replicas that ``replicas()`` returns at each scrape."""
        self._sources.append((base_model, replicas))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of one scrape."""
        labels = ("base", "replica")
        up = GaugeMetricFamily("weft_replica_up", "1 while the replica answers and draws.", labels=labels)
        draining = GaugeMetricFamily("weft_replica_draining", "1 while the replica gets no new samples.", labels=labels)
        asleep = GaugeMetricFamily(
            "weft_replica_asleep", "1 while the replica sleeps or its sleep state is unknown.", labels=labels
        )
        load = GaugeMetricFamily(
            "weft_replica_sequences", "Sequences of this process that run on the replica.", labels=labels
        )
        for base_model, replicas in self._sources:
            for one in replicas():
                values = (base_label(base_model), replica_label(one.name, base_model))
                up.add_metric(values, float(one.works))
                draining.add_metric(values, float(one.is_draining))
                asleep.add_metric(values, float(one.is_asleep is not False))
                load.add_metric(values, float(one.sequences))
        yield from (up, draining, asleep, load)


class BaseModelCollector(Collector):
    """A number of each base model's trainer."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name, self._documentation = name, documentation
        self._sources: dict[str, Callable[[], int]] = {}

    def watch(self, base_model: str, count: Callable[[], int]) -> None:
        """Show the number that ``count()`` returns at each scrape."""
        self._sources[base_model] = count

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of one scrape."""
        family = GaugeMetricFamily(self._name, self._documentation, labels=("base",))
        for base_model, count in self._sources.items():
            family.add_metric((base_label(base_model),), count())
        yield family


@dataclass(frozen=True, slots=True)
class QueueState:
    """Number of pending operations of one kind on one base model.

    ``held`` of them are held on purpose; ``oldest`` is when the oldest of the others was accepted, None if there is none.
    """

    kind: str
    base_model: str
    pending: int
    held: int
    oldest: datetime | None


class QueueCollector(Collector):
    """Queue depth as last read. While the database does not answer no depth is shown, since an old one would mislead."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: dict[tuple[str, str], QueueState | None] = {}
        self._is_up: bool | None = None

    def put(self, states: Sequence[QueueState] | None) -> None:
        """Show ``states`` from now on; None means that the database did not answer."""
        self._is_up = states is not None
        # Kinds seen before are shown as 0, so that an empty queue differs from a missing one.
        self._states = dict.fromkeys(self._states) if states is not None else self._states
        self._states |= {(one.kind, one.base_model): one for one in states or ()}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of one scrape."""
        if self._is_up is None:
            return
        yield GaugeMetricFamily("weft_database_up", "1 while the database answers.", value=float(self._is_up))
        if not self._is_up:
            return
        labels, now = ("kind", "base"), self._clock()
        pending = GaugeMetricFamily(
            "weft_pending_operations", "Operations that are accepted and not final yet.", labels=labels
        )
        held = GaugeMetricFamily(
            "weft_held_operations",
            "Pending operations that a suspension, a spent budget, a rate or a closed gate holds.",
            labels=labels,
        )
        oldest = GaugeMetricFamily(
            "weft_oldest_pending_seconds",
            "Age of the oldest pending operation that nothing holds on purpose, in seconds.",
            labels=labels,
        )
        for (kind, base_model), state in self._states.items():
            values = (kind, base_label(base_model))
            since = None if state is None else state.oldest
            pending.add_metric(values, 0 if state is None else state.pending)
            held.add_metric(values, 0 if state is None else state.held)
            oldest.add_metric(values, 0.0 if since is None else max(0.0, (now - since).total_seconds()))
        yield from (pending, held, oldest)


class PoolCollector(Collector):
    """The database's connection pool.

    SQLAlchemy does not count waiting callers. A pool that is fully in use for long shows that callers wait.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def watch(self, pool: Pool) -> None:
        """Show ``pool`` from now on."""
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of one scrape."""
        pool = self._pool
        if not isinstance(pool, QueuePool):
            return
        # SQLAlchemy has no public name for the overflow limit.
        most = pool.size() + max(pool._max_overflow, 0)
        for name, text, value in (
            ("checked_out", "Database connections in use.", pool.checkedout()),
            ("idle", "Database connections that are open and not in use.", pool.checkedin()),
            ("overflow", "Database connections open beyond the pool's size.", max(pool.overflow(), 0)),
            ("size", "Database connections that the pool keeps open.", pool.size()),
            ("limit", "Most database connections at once; further callers wait.", most),
        ):
            yield GaugeMetricFamily(f"weft_database_pool_{name}", text, value=value)
