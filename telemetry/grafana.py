"""A Grafana dashboard of every metric: a row for each area, a panel for each metric, with alerts on top.

Each expression is made from the metric's kind and labels, so a new metric has its panel as soon as it is declared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from telemetry.alerts import ALERTS
from telemetry.families import MetricFamily, metric_families

SCHEMA_VERSION = 39
"""Version of the dashboard's JSON: Grafana 11 reads it, and later ones raise it themselves."""
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 7
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

AREAS: dict[str, tuple[str, ...]] = {
    "Queue": ("weft_pending_", "weft_held_", "weft_oldest_", "weft_queue_", "weft_operations_"),
    "Training": ("weft_pass_", "weft_trained_", "weft_optimizer_", "weft_policy_"),
    "Adapters and snapshots": (
        "weft_adapters_",
        "weft_snapshot",
        "weft_restore_",
        "weft_replayed_",
        "weft_publish_",
    ),
    "Sampling": ("weft_sample", "weft_drawn_", "weft_prompt_", "weft_swap_"),
    "Replicas and devices": ("weft_replica_", "weft_self_", "weft_device_"),
    "HTTP": ("weft_http_",),
    "Database and leases": ("weft_database_", "weft_lease_"),
    "Housekeeping": ("weft_housekeeping_",),
    "Processes": ("weft_process_", "weft_event_loop_", "process_"),
}
"""Rows of the dashboard, in order, and how the names of their metrics begin."""

_SUMMED = ("weft_adapters_resident", "weft_replica_sequences")
"""Gauges of a process's own part: the service's figure is their sum. Every process reads the same queue, so that is no sum."""
_LOWEST = ("weft_database_up", "weft_replica_up", "weft_housekeeping_success_age_seconds")
"""Gauges of which the lowest tells: one process that sees it is enough, or one that does not."""


@dataclass(frozen=True, slots=True)
class _Series:
    expression: str
    legend: str


def grafana_dashboard() -> dict[str, Any]:
    """Return the dashboard's document, the same for the same metrics."""
    panels: list[dict[str, Any]] = [_alerts_panel()]
    top = _HEIGHT
    for area, families in _areas():
        panels.append(_row(area, top))
        top += 1
        for place, family in enumerate(families):
            left, down = place % _COLUMNS * _WIDTH, place // _COLUMNS * _HEIGHT
            panels.append(_panel(family, {"h": _HEIGHT, "w": _WIDTH, "x": left, "y": top + down}))
        top += -(-len(families) // _COLUMNS) * _HEIGHT
    return {
        "id": None,
        "uid": "weft",
        "title": "weft",
        "description": "Every metric of weft, from its own registry (`weft grafana`).",
        "tags": ["weft"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_source_choice(), _base_choice()]},
        "annotations": {"list": []},
        "links": [],
        "panels": [{**panel, "id": number} for number, panel in enumerate(panels, start=1)],
    }


def area_of(name: str) -> str | None:
    """Return the row that the metric is in, None for one that no area names."""
    return next((area for area, starts in AREAS.items() if name.startswith(starts)), None)


def _areas() -> Iterator[tuple[str, list[MetricFamily]]]:
    every = metric_families()
    for area in [*AREAS, None]:
        families = [one for one in every if area_of(one.name) == area]
        if families:
            yield area or "Other", families


def _series(family: MetricFamily) -> list[_Series]:
    chosen = '{base=~"$base"}' if "base" in family.labels else ""
    by = ", ".join(family.labels) or "instance"
    legend = " ".join(f"{{{{{label}}}}}" for label in family.labels or ("instance",))
    if family.kind == "counter":
        return [_Series(f"sum by ({by}) (rate({family.name}{chosen}[$__rate_interval]))", legend)]
    if family.kind == "histogram":
        buckets = f"sum by (le, {by}) (rate({family.name}_bucket{chosen}[$__rate_interval]))"
        return [
            _Series(f"histogram_quantile({quantile}, {buckets})", f"p{percent} {legend}")
            for quantile, percent in ((0.5, 50), (0.95, 95))
        ]
    if family.kind == "info":
        return [_Series(f"count by ({by}) ({family.name})", legend)]
    if family.name == "process_start_time_seconds":
        return [_Series(f"time() - max by ({by}) ({family.name})", legend)]
    return [_Series(f"{_gathered(family)} by ({by}) ({family.name}{chosen})", legend)]


def _gathered(family: MetricFamily) -> str:
    if family.name in _SUMMED:
        return "sum"
    return "min" if family.name in _LOWEST else "max"


def _unit(family: MetricFamily) -> str:
    name = family.name
    if name == "process_cpu_seconds_total":
        return "suffix: cores"
    if name.endswith("_seconds_total"):
        return "percentunit"
    if name.endswith("_tokens_total"):
        return "suffix: tokens/s"
    if family.kind == "counter":
        return "suffix:/s"
    if name.endswith("_seconds"):
        return "s"
    if name.endswith("_bytes"):
        return "bytes"
    return "percentunit" if name.endswith(("_padding_ratio", "_ratio_outside")) else "short"


def _title(family: MetricFamily) -> str:
    words = family.name.removeprefix("weft_").removesuffix("_total").removesuffix("_seconds").replace("_", " ")
    return words[:1].upper() + words[1:]


def _panel(family: MetricFamily, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": _title(family),
        "description": f"`{family.name}`: {family.text}",
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": _unit(family),
                "min": 0,
                "custom": {"fillOpacity": 8, "lineWidth": 1, "showPoints": "never", "spanNulls": False},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": _targets(_series(family)),
    }


def _alerts_panel() -> dict[str, Any]:
    series = [_Series(f"count({one.expression}) or vector(0)", one.name.removeprefix("Weft")) for one in ALERTS]
    steps = [{"color": "green", "value": None}, {"color": "red", "value": 1}]
    return {
        "type": "stat",
        "title": "Alerts: how many things are wrong",
        "description": "The rules that `weft grafana --alerts` writes, without their durations.",
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH * _COLUMNS, "x": 0, "y": 0},
        "fieldConfig": {
            "defaults": {"unit": "short", "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {
            "colorMode": "background",
            "graphMode": "none",
            "textMode": "value_and_name",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
        "targets": _targets(series),
    }


def _row(title: str, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": _WIDTH * _COLUMNS, "x": 0, "y": top}
    return {"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _targets(series: Sequence[_Series]) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + place),
            "datasource": _SOURCE,
            "expr": one.expression,
            "legendFormat": one.legend,
            "range": True,
        }
        for place, one in enumerate(series)
    ]


def _source_choice() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}


def _base_choice() -> dict[str, Any]:
    query = 'label_values({__name__=~"weft_.+"}, base)'
    return {
        "name": "base",
        "label": "Base model",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "base"},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "refresh": 2,
        "sort": 1,
    }
