"""Page of every Prometheus metric, rendered from the registry that a process serves at ``/metrics``."""

from collections.abc import Iterator
from types import SimpleNamespace

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from sqlalchemy.ext.asyncio import create_async_engine

from cli.pages.markdown import GENERATED, table
from store.clock import utc_now
from telemetry.collectors import QueueState
from telemetry.housekeeping import StepState
from telemetry.telemetry import Telemetry

_HEAD = f"""# Metrics

{GENERATED.format(source="telemetry/")}

`WEFT_METRICS_PORT` turns them on. [Scrape metrics](../how-to/scrape-metrics.md) tells how, what the labels mean and which alerts
are worth having. A histogram has `_bucket`, `_sum` and `_count`. A process shows the metrics of its own part only.

"""
_SUFFIX = {"counter": "_total", "info": "_info"}


def render() -> str:
    """Return the page."""
    return _HEAD + table(("metric", "kind", "labels", "meaning"), sorted(_rows()))


def _rows() -> Iterator[tuple[str, str, str, str]]:
    for collector in _collectors():
        for family in collector.collect():
            labels = tuple(family.samples[0].labels) if family.samples else ()
            if isinstance(collector, MetricWrapperBase) and collector._labelnames:
                # prometheus_client has no public name for a family's labels while it has no samples.
                labels = tuple(collector._labelnames)
            shown = ", ".join(f"`{label}`" for label in labels)
            yield f"`{family.name}{_SUFFIX.get(family.type, '')}`", family.type, shown, family.documentation


def _collectors() -> list[Collector]:
    """Return the collectors of a process that has one of everything, so that each shows its labels."""
    telemetry = Telemetry.of("serve", utc_now)
    metrics = telemetry.metrics
    replica = SimpleNamespace(name="vllm-0", sequences=0, is_alive=True, is_draining=False, is_asleep=False)
    metrics.queue_read([QueueState("sample", "base", 0, utc_now())])
    metrics.housekeeping_read([StepState("end-sessions", 0.0, utc_now(), None, None)])
    metrics.watch_database(create_async_engine("postgresql+asyncpg://"))
    metrics.watch_replicas("base", lambda: [replica])
    metrics.watch_residents("base", lambda: 0)
    # The registry has no public list of its collectors either.
    return list(metrics.registry._collector_to_names)
