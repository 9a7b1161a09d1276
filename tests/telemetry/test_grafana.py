"""The Grafana dashboard and the alert rules: made from the registry, so that no expression asks for what nobody serves."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from store.settings import Settings
from telemetry.alerts import ALERTS, alert_rules
from telemetry.families import metric_families
from telemetry.grafana import area_of, grafana_dashboard
from tests.conftest import ROOT
from workers.housekeeping.schedule import StepName, interval

SERIES = {
    family.name + suffix: set(family.labels) | ({"le"} if suffix == "_bucket" else set())
    for family in metric_families()
    for suffix in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
}
TARGET_LABELS = {"instance", "job"}
"""Labels that Prometheus itself adds."""
_NAME = re.compile(r"\b(?:weft|process)_[a-z_]+")
_SELECTED = re.compile(r"\b((?:weft|process)_[a-z_]+)\{([^}]*)\}")
_BY = re.compile(r"by \(([^)]*)\)")


def expressions() -> list[str]:
    panels = grafana_dashboard()["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())] + [
        alert.expression for alert in ALERTS
    ]


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_each_expression_names_metrics_and_labels_that_are_served(expression: str) -> None:
    names = set(_NAME.findall(expression))
    assert names
    assert names <= SERIES.keys()
    for name, selectors in _SELECTED.findall(expression):
        assert {re.split(r"=|!=|=~|!~", one)[0].strip("! ") for one in selectors.split(",")} <= SERIES[name]
    known = set.union(*(SERIES[name] for name in names)) | TARGET_LABELS
    for labels in _BY.findall(expression):
        assert {one.strip() for one in labels.split(",")} <= known
    assert expression.count("(") == expression.count(")")


def test_a_counter_is_a_rate_and_a_histogram_two_quantiles() -> None:
    kinds = {family.name: family.kind for family in metric_families()}
    for panel in grafana_dashboard()["panels"]:
        if panel["type"] != "timeseries":
            continue
        shown = [target["expr"] for target in panel["targets"]]
        kind = kinds[panel["description"].split("`")[1]]
        assert len(shown) == (2 if kind == "histogram" else 1)
        assert all(("rate(" in one) == (kind in ("counter", "histogram")) for one in shown)
        assert all(("histogram_quantile(" in one) == (kind == "histogram") for one in shown)


def test_every_metric_has_one_panel_in_a_named_row() -> None:
    shown = [
        panel["description"].split("`")[1] for panel in grafana_dashboard()["panels"] if panel["type"] == "timeseries"
    ]
    assert sorted(shown) == [family.name for family in metric_families()]
    assert [family.name for family in metric_families() if area_of(family.name) is None] == []


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    dashboard = grafana_dashboard()
    assert dashboard["id"] is None
    assert dashboard["schemaVersion"] >= 39
    panels = dashboard["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    (source,) = [one for one in dashboard["templating"]["list"] if one["type"] == "datasource"]
    assert {panel["datasource"]["uid"] for panel in panels if "datasource" in panel} == {f"${{{source['name']}}}"}
    places = sorted((one["gridPos"]["y"], one["gridPos"]["x"], one["gridPos"]) for one in panels if one)
    for (top, left, place), (next_top, next_left, _) in pairwise(places):
        assert left + place["w"] <= 24
        assert next_top >= top + place["h"] or next_left >= left + place["w"]
    for panel in panels:
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert all(re.fullmatch("[A-Z]", letter) for letter in letters)
        assert len(set(letters)) == len(letters)


def test_the_command_writes_the_same_twice(tmp_path: Path) -> None:
    written = [CliRunner().invoke(app, ["grafana"]).output for _ in range(2)]
    assert written[0] == written[1]
    assert json.loads(written[0]) == grafana_dashboard()
    file = tmp_path / "rules.json"
    assert CliRunner().invoke(app, ["grafana", "--alerts", "--out", str(file)]).exit_code == 0
    assert json.loads(file.read_text()) == alert_rules()


def test_the_docs_and_the_rules_have_the_same_alerts() -> None:
    page = (ROOT / "docs/how-to/scrape-metrics.md").read_text().partition("## Alerts")[2]
    told = set(re.findall(r"`([^`]*weft_[^`]*[<>=][^`]*)`", page))
    counts = {one for one in told if one.startswith("count(weft_process_info")}
    assert told - counts == {alert.expression for alert in ALERTS}
    assert all(alert.text in page for alert in ALERTS)


def test_each_figure_of_how_far_the_sampling_policy_is_has_an_alert_by_base_model() -> None:
    """Series are kept apart by base model, so that one sampler does not hide behind another base's."""
    figures = {family.name for family in metric_families() if family.name.startswith("weft_policy_")}
    assert len(figures) == 3
    for figure in figures:
        (alert,) = (one for one in ALERTS if f"{figure}_bucket" in one.expression)
        assert "by (le, base)" in alert.expression


def test_a_step_of_housekeeping_that_runs_in_time_raises_no_alert_and_one_that_stands_does() -> None:
    """A step's age grows up to its interval before the step runs again: each bound is well above that."""
    rules = [one.expression for one in ALERTS if "weft_housekeeping_success_age_seconds" in one.expression]
    for step in StepName:
        bounds = [float(rule.rpartition(">")[2]) for rule in rules if f'step!="{step}"' not in rule]
        assert bounds, step
        assert min(bounds) >= 3 * interval(step, Settings()).total_seconds(), step
