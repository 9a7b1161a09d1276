"""The ``weft`` command. Subcommands import what they need, so that ``weft --help`` stays quick."""

import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.command_line import begin_command
from cli.global_options import GlobalOptions, JsonOption, KeyOption, UrlOption
from cli.grafana import grafana
from cli.lazy_group import add_lazy_group
from cli.options import BaseOption, DataOption, HostOption, PortOption, load_settings, run_or_explain
from cli.top import top
from store.private_folder import PRIVATE_UMASK, open_private_folder
from workers.loading import loading_libraries

if TYPE_CHECKING:
    from store.settings import Settings


def _begin(context: typer.Context, url: UrlOption = None, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """weft: multi-tenant LoRA training behind the Tinker API."""
    # Only the service's own user may read what a command writes.
    os.umask(PRIVATE_UMASK)
    begin_command(sys.argv[1:])
    context.obj = GlobalOptions(url, key, as_json)


app = typer.Typer(
    help="weft: multi-tenant LoRA training behind the Tinker API.",
    no_args_is_help=True,
    callback=_begin,
)
model_app = typer.Typer(help="Make base models to try weft with.", no_args_is_help=True)
database_app = typer.Typer(help="Upgrade the database.", no_args_is_help=True)
add_lazy_group(
    app, "tenant", "cli.tenants", "Make, list and show tenants, set their limits, suspend them, and show their usage."
)
add_lazy_group(app, "key", "cli.keys", "Make, list, rotate and revoke API keys.")
add_lazy_group(
    app, "project", "cli.projects", "Make, list and bound projects, which clients name as TINKER_PROJECT_ID."
)
add_lazy_group(app, "price", "cli.prices", "Add and list prices of tokens and storage.")
add_lazy_group(app, "alert", "cli.alerts", "See which tenants' budgets are nearly spent, or are.")
add_lazy_group(app, "usage", "cli.usage", "Export usage for a bill, and count it again.")
app.add_typer(model_app, name="model")
app.add_typer(database_app, name="db")
add_lazy_group(app, "audit", "cli.audit", "Read the audit log: who did what. Prove that nothing in it was changed.")
add_lazy_group(app, "gate", "cli.gates", "Pause and resume sampling. A running service follows within seconds.")
add_lazy_group(app, "housekeeping", "cli.housekeeping", "Run housekeeping by hand, and see its last runs.")
add_lazy_group(
    app, "replica", "cli.replicas", "Drain replicas or put them to sleep. A running service follows within seconds."
)
add_lazy_group(
    app, "operation", "cli.operations", "Look at operations: what waits and why. End one, or have it begun anew."
)
add_lazy_group(app, "run", "cli.runs", "Look at training runs and their history, move one, or page it out.")
add_lazy_group(app, "trainer", "cli.trainers", "List trainers, and drain one before its machine is worked on.")
add_lazy_group(app, "process", "cli.trainers", "List the sampling processes.", "process_app")
add_lazy_group(app, "session", "cli.sessions", "List, show and end clients' sessions.")
add_lazy_group(app, "queue", "cli.queue", "See what waits, and who fills the queue.")
add_lazy_group(app, "ui", "cli.ui", "Open the dashboard.")
add_lazy_group(app, "operator", "cli.operator_keys", "Make, list and revoke operators' keys for the admin API.")
app.command("top")(top)
app.command("grafana")(grafana)
add_lazy_group(app, "webhook", "cli.webhooks", "Tell tenants' own addresses of what happens.")
add_lazy_group(app, "base", "cli.bases", "List base models' weights, and accept others under a name.")
add_lazy_group(
    app,
    "checkpoint",
    "cli.checkpoint",
    "List, show and delete checkpoints, merge them into their base, and import adapters.",
)


def _run(settings: "Settings", process: str, main: Callable[["Settings"], Coroutine[Any, Any, None]]) -> None:
    # Imported late, so that `weft --help` stays quick.
    from cli.process import run_process

    run_or_explain(lambda: run_process(settings, process, main))


def _prepare_torch() -> None:
    """Set environment variables that torch and transformers read when they are imported."""
    # Trainer and sampler each have a pool of OpenMP threads. Idle threads that spin for long take the other pool's cores;
    # idle threads that sleep at once are late for each of many small products.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Progress bars would break up the lines of the log.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@app.command()
def serve(
    base_model: BaseOption = None, data: DataOption = None, host: HostOption = None, port: PortOption = None
) -> None:
    """Run the whole service in this process: API, trainer and sampler, on SQLite and a data folder."""
    _prepare_torch()
    with loading_libraries():
        from cli.serve import serve as run

    settings = load_settings(data=data, base_models=base_model, host=host, port=port)
    _run(settings, "serve", run)


@app.command()
def api(
    base_model: BaseOption = None, data: DataOption = None, host: HostOption = None, port: PortOption = None
) -> None:
    """Run one API process of a cluster. Any number of API processes may share an address."""
    with loading_libraries():
        from cli.api import serve_api

    settings = load_settings(data=data, base_models=base_model, host=host, port=port)
    _run(settings, "api", serve_api)


@app.command()
def worker(base_model: BaseOption = None, data: DataOption = None) -> None:
    """Run a trainer of a cluster, which also does housekeeping."""
    _prepare_torch()
    with loading_libraries():
        from cli.worker import work

    settings = load_settings(data=data, base_models=base_model)
    _run(settings, "worker", work)


@app.command()
def pool(base_model: BaseOption = None, data: DataOption = None) -> None:
    """Run a sampling process of a cluster, on vLLM servers, or with torch when the settings name none."""
    _prepare_torch()
    with loading_libraries():
        from cli.pool import sample

    settings = load_settings(data=data, base_models=base_model)
    _run(settings, "pool", sample)


@app.command()
def beat(data: DataOption = None) -> None:
    """Send a cluster's housekeeping tasks when they are due."""
    from cli.beat import send_when_due

    settings = load_settings(data=data)
    run_or_explain(lambda: send_when_due(settings))


@app.command()
def up(
    base_model: BaseOption = None,
    data: DataOption = None,
    host: HostOption = None,
    port: PortOption = None,
    apis: Annotated[int, typer.Option(min=1, help="API processes, all on one address.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, help="Trainers of each base model.")] = 1,
    pools: Annotated[int, typer.Option(min=1, help="Sampling processes of each base model.")] = 1,
) -> None:
    """Run a whole cluster on this machine, over PostgreSQL and Redis, until Ctrl-C."""
    with loading_libraries():
        from cli.up import Sizes, run_cluster

    settings = load_settings(data=data, base_models=base_model, host=host, port=port)
    sizes = Sizes(apis, trainers, pools)
    _run(settings, "up", lambda given: run_cluster(given, sizes))


@app.command()
def doctor(
    context: typer.Context,
    base_model: BaseOption = None,
    data: DataOption = None,
    host: HostOption = None,
    port: PortOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check settings, database, base models, port and a cluster's parts, and say how to mend what is wrong."""
    from cli.admin_command import Shown, show
    from cli.doctor import examine
    from cli.finding import Findings

    findings = examine(load_settings(data=data, base_models=base_model, host=host, port=port))
    lines = [f"{finding.mark} {finding.part}: {finding.text}" for finding in findings]
    is_failure = not all(finding.is_well for finding in findings)
    show(Shown(Findings(items=findings), lines, is_failure), context, as_json=as_json)


@model_app.command("tiny")
def model_tiny(directory: Path, seed: int = 0) -> None:
    """Write a tiny random-weight Qwen3 with a byte-level tokenizer: a base to try weft with."""
    from engine.model.tiny_model import write_tiny_model

    run_or_explain(lambda: write_tiny_model(directory, seed=seed))
    typer.echo(f"wrote {directory}; try: weft serve --base-model {directory}")


@database_app.command("upgrade")
def database_upgrade(data: DataOption = None) -> None:
    """Bring the database's schema up to date."""
    from migrations.upgrade import upgrade

    settings = load_settings(data=data)

    def bring_up_to_date() -> None:
        open_private_folder(settings.data_dir)
        upgrade(settings.resolved_database_url())

    run_or_explain(bring_up_to_date)
    typer.echo("the schema is up to date")


if __name__ == "__main__":
    app()
