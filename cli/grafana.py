"""``weft grafana``: a dashboard and alert rules for the metrics that weft serves, made from their registry."""

import json
from pathlib import Path
from typing import Annotated

import typer


def grafana(
    out: Annotated[Path | None, typer.Option(help="File to write; without one it is printed.")] = None,
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Write Prometheus' alert rules instead of the dashboard.")
    ] = False,
) -> None:
    """Write a Grafana dashboard of every metric, or alert rules for Prometheus: no service is asked."""
    # Imported late, so that `weft --help` stays quick.
    from telemetry.alerts import alert_rules
    from telemetry.grafana import grafana_dashboard

    text = json.dumps(alert_rules() if alerts else grafana_dashboard(), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    out.write_text(text)
    typer.echo(f"wrote {out}")
