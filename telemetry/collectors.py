"""Figures that are read where they are when Prometheus asks: nothing to keep up to date. No I/O here."""

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
    """What the router knows of a replica."""

    sequences: int
    is_alive: bool
    is_draining: bool
    is_asleep: bool | None

    @property
    def name(self) -> str:
        """Unique within its base model."""
        ...


class ReplicaCollector(Collector):
    """Health and load of every replica that this process sends samples to."""

    def __init__(self) -> None:
        self._sources: list[tuple[str, Callable[[], Iterable[ReplicaState]]]] = []

    def watch(self, base_model: str, replicas: Callable[[], Iterable[ReplicaState]]) -> None:
        """Show what ``replicas`` returns from now on."""
        self._sources.append((base_model, replicas))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See ``Collector``."""
        labels = ("base", "replica")
        up = GaugeMetricFamily("weft_replica_up", "1 while the replica answers.", labels=labels)
        draining = GaugeMetricFamily("weft_replica_draining", "1 while it gets no new samples.", labels=labels)
        asleep = GaugeMetricFamily("weft_replica_asleep", "1 while it sleeps, or may.", labels=labels)
        load = GaugeMetricFamily("weft_replica_sequences", "Sequences this process has there now.", labels=labels)
        for base_model, replicas in self._sources:
            for one in replicas():
                values = (base_label(base_model), replica_label(one.name, base_model))
                up.add_metric(values, float(one.is_alive))
                draining.add_metric(values, float(one.is_draining))
                asleep.add_metric(values, float(one.is_asleep is not False))
                load.add_metric(values, float(one.sequences))
        yield from (up, draining, asleep, load)


class ResidentCollector(Collector):
    """Adapters in trainers' memory."""

    def __init__(self) -> None:
        self._sources: dict[str, Callable[[], int]] = {}

    def watch(self, base_model: str, count: Callable[[], int]) -> None:
        """Show what ``count`` returns from now on."""
        self._sources[base_model] = count

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See ``Collector``."""
        resident = GaugeMetricFamily("weft_adapters_resident", "Adapters in the trainer's memory.", labels=("base",))
        for base_model, count in self._sources.items():
            resident.add_metric((base_label(base_model),), count())
        yield resident


@dataclass(frozen=True, slots=True)
class QueueState:
    """Pending operations of one kind on one base model, and when the oldest was accepted."""

    kind: str
    base_model: str
    pending: int
    oldest: datetime


class QueueCollector(Collector):
    """The queue as it was last read. Shows no depth while the database does not answer: an old one would mislead."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: dict[tuple[str, str], QueueState | None] = {}
        self._is_up: bool | None = None

    def put(self, states: Sequence[QueueState] | None) -> None:
        """Show these from now on; None: the database did not answer."""
        self._is_up = states is not None
        # What was pending once is shown as 0, so that a drained queue is not a missing one.
        self._states = dict.fromkeys(self._states) if states is not None else self._states
        self._states |= {(one.kind, one.base_model): one for one in states or ()}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See ``Collector``."""
        if self._is_up is None:
            return
        yield GaugeMetricFamily("weft_database_up", "1 while the database answers.", value=float(self._is_up))
        if not self._is_up:
            return
        labels, now = ("kind", "base"), self._clock()
        pending = GaugeMetricFamily("weft_pending_operations", "Accepted operations not final yet.", labels=labels)
        oldest = GaugeMetricFamily("weft_oldest_pending_seconds", "Age of the oldest of them.", labels=labels)
        for (kind, base_model), state in self._states.items():
            values = (kind, base_label(base_model))
            age = 0.0 if state is None else max(0.0, (now - state.oldest).total_seconds())
            pending.add_metric(values, 0 if state is None else state.pending)
            oldest.add_metric(values, age)
        yield from (pending, oldest)


class PoolCollector(Collector):
    """The database's connections. SQLAlchemy does not count who waits: all in use for long is the sign of it."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def watch(self, pool: Pool) -> None:
        """Show ``pool`` from now on."""
        self._pool = pool

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See ``Collector``."""
        pool = self._pool
        if not isinstance(pool, QueuePool):
            return
        # SQLAlchemy has no public name for it.
        most = pool.size() + max(pool._max_overflow, 0)
        for name, text, value in (
            ("checked_out", "Connections in use.", pool.checkedout()),
            ("idle", "Connections open and not in use.", pool.checkedin()),
            ("overflow", "Connections open beyond the pool's size.", max(pool.overflow(), 0)),
            ("size", "Connections kept open.", pool.size()),
            ("limit", "Most connections at once; who comes then waits.", most),
        ):
            yield GaugeMetricFamily(f"weft_database_pool_{name}", text, value=value)
