"""Every metric family that a process may serve, with its kind, labels and meaning, read from the registry itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NoReturn

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from sqlalchemy.pool import QueuePool

from store.clock import utc_now
from telemetry.collectors import QueueState
from telemetry.housekeeping import StepState
from telemetry.telemetry import Telemetry

_SUFFIX = {"counter": "_total", "info": "_info"}


@dataclass(frozen=True, slots=True, order=True)
class MetricFamily:
    """A metric as it is scraped. A histogram's series have ``_bucket``, ``_sum`` and ``_count`` after ``name``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def metric_families() -> list[MetricFamily]:
    """Return the families of a process that has one of everything, in order of their names."""
    return sorted(_families())


def _families() -> Iterator[MetricFamily]:
    for collector in _collectors():
        for family in collector.collect():
            labels = tuple(family.samples[0].labels) if family.samples else ()
            if isinstance(collector, MetricWrapperBase) and collector._labelnames:
                # prometheus_client has no public name for a family's labels while it has no samples.
                labels = tuple(collector._labelnames)
            yield MetricFamily(family.name + _SUFFIX.get(family.type, ""), family.type, labels, family.documentation)


def _collectors() -> list[Collector]:
    """Return collectors that each have something to show, so that each shows its labels."""
    telemetry = Telemetry.of("serve", utc_now)
    metrics = telemetry.metrics
    replica = SimpleNamespace(name="vllm-0", sequences=0, works=True, is_draining=False, is_asleep=False)
    metrics.queue_read([QueueState("sample", "base", 0, 0, None)])
    metrics.housekeeping_read([StepState("end-sessions", 0.0, utc_now(), None, None)])
    metrics.watch_pool(QueuePool(_connect))
    metrics.watch_replicas("base", lambda: [replica])
    metrics.watch_residents("base", lambda: 0)
    metrics.watch_micro_batches("base", lambda: 0)
    # The registry has no public list of its collectors either.
    return list(metrics.registry._collector_to_names)


def _connect() -> NoReturn:
    raise RuntimeError("this pool is shown, and never used")
