"""Page of every Prometheus metric, rendered from the registry that a process serves at ``/metrics``."""

from cli.pages.markdown import GENERATED, table
from telemetry.families import metric_families

_HEAD = f"""# Metrics

{GENERATED.format(source="telemetry/")}

`WEFT_METRICS_PORT` turns them on. [Scrape metrics](../how-to/scrape-metrics.md) tells how, what the labels mean and which alerts
are worth having. A histogram has `_bucket`, `_sum` and `_count`. A process shows the metrics of its own part only.

"""


def render() -> str:
    """Return the page."""
    rows = [
        (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.text)
        for one in metric_families()
    ]
    return _HEAD + table(("metric", "kind", "labels", "meaning"), rows)
