"""The ``weft`` command. Subcommands import what they need, so that ``weft --help`` stays quick."""

import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import (
    bases,
    checkpoint,
    gates,
    housekeeping,
    keys,
    operations,
    projects,
    replicas,
    runs,
    sessions,
    suspensions,
    tenant_limits,
    trainers,
)
from cli.operator_log import begin_command
from cli.options import BaseOption, DataOption, HostOption, PortOption, load_settings, run_or_explain
from cli.process import run_process
from store.private_folder import PRIVATE_UMASK, open_private_folder
from store.settings import Settings


def _begin() -> None:
    """Let only the service's own user read what the command writes, and remember the command for the security log."""
    os.umask(PRIVATE_UMASK)
    begin_command(sys.argv[1:])


app = typer.Typer(
    help="weft: multi-tenant LoRA training behind the Tinker API.",
    no_args_is_help=True,
    callback=_begin,
)
tenant_app = typer.Typer(
    help="Make and list tenants, set their limits, suspend them, and show their usage.", no_args_is_help=True
)
model_app = typer.Typer(help="Make base models to try weft with.", no_args_is_help=True)
database_app = typer.Typer(help="Upgrade the database.", no_args_is_help=True)
tenant_app.command("set")(tenant_limits.set_values)
tenant_app.command("limits")(tenant_limits.show)
tenant_app.command("suspend")(suspensions.suspend)
tenant_app.command("resume")(suspensions.resume)
app.add_typer(tenant_app, name="tenant")
app.add_typer(keys.app, name="key")
app.add_typer(projects.app, name="project")
app.add_typer(model_app, name="model")
app.add_typer(database_app, name="db")
app.add_typer(gates.app, name="gate")
app.add_typer(housekeeping.app, name="housekeeping")
app.add_typer(replicas.app, name="replica")
app.add_typer(operations.app, name="operation")
app.add_typer(runs.app, name="run")
app.add_typer(trainers.app, name="trainer")
app.add_typer(sessions.app, name="session")
app.add_typer(bases.app, name="base")
app.add_typer(checkpoint.app, name="checkpoint")


def _on_database(settings: Settings, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    from cli.administration import on_database

    return run_or_explain(lambda: on_database(settings, work))


def _prepare_libraries() -> None:
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
    _prepare_libraries()
    from cli.serve import serve as run

    settings = load_settings(data=data, base_models=base_model, host=host, port=port)
    run_or_explain(lambda: run_process(settings, "serve", run))


@app.command()
def api(
    base_model: BaseOption = None, data: DataOption = None, host: HostOption = None, port: PortOption = None
) -> None:
    """Run one API process of a cluster. Any number of API processes may share an address."""
    from cli.api import serve_api

    settings = load_settings(data=data, base_models=base_model, host=host, port=port)
    run_or_explain(lambda: run_process(settings, "api", serve_api))


@app.command()
def worker(base_model: BaseOption = None, data: DataOption = None) -> None:
    """Run a trainer of a cluster, which also does housekeeping."""
    _prepare_libraries()
    from cli.worker import work

    settings = load_settings(data=data, base_models=base_model)
    run_or_explain(lambda: run_process(settings, "worker", work))


@app.command()
def pool(base_model: BaseOption = None, data: DataOption = None) -> None:
    """Run a sampling process of a cluster, on vLLM servers, or with torch when the settings name none."""
    _prepare_libraries()
    from cli.pool import sample

    settings = load_settings(data=data, base_models=base_model)
    run_or_explain(lambda: run_process(settings, "pool", sample))


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
    from cli.up import Sizes, run_cluster

    settings = load_settings(data=data, base_models=base_model, host=host, port=port)
    sizes = Sizes(apis, trainers, pools)
    run_or_explain(lambda: run_process(settings, "up", lambda given: run_cluster(given, sizes)))


@app.command()
def doctor(
    base_model: BaseOption = None, data: DataOption = None, host: HostOption = None, port: PortOption = None
) -> None:
    """Check settings, database, base models, port and a cluster's parts, and say how to mend what is wrong."""
    from cli.doctor import examine

    findings = examine(load_settings(data=data, base_models=base_model, host=host, port=port))
    for finding in findings:
        typer.echo(f"{finding.mark} {finding.part}: {finding.text}")
    if not all(finding.is_well for finding in findings):
        raise typer.Exit(1)


@model_app.command("tiny")
def model_tiny(directory: Path, seed: int = 0) -> None:
    """Write a tiny random-weight Qwen3 with a byte-level tokenizer: a base to try weft with."""
    from engine.model.tiny_model import write_tiny_model

    run_or_explain(lambda: write_tiny_model(directory, seed=seed))
    typer.echo(f"wrote {directory}; try: weft serve --base-model {directory}")


@tenant_app.command("create")
def tenant_create(name: str, data: DataOption = None) -> None:
    """Make a tenant and its first key. The key is shown only once."""
    from cli.administration import new_tenant

    secret = _on_database(load_settings(data=data), lambda database: new_tenant(database, name))
    typer.echo(secret)


@tenant_app.command("list")
def tenant_list(data: DataOption = None) -> None:
    """List all tenants."""
    from cli.administration import tenant_lines

    for line in _on_database(load_settings(data=data), tenant_lines):
        typer.echo(line)


@tenant_app.command("usage")
def tenant_usage(
    days: Annotated[int, typer.Option(min=1, help="Number of days up to today.")] = 30, data: DataOption = None
) -> None:
    """List usage: tenant, day, base model, kind of operation, operations and tokens."""
    from cli.administration import usage_lines

    for line in _on_database(load_settings(data=data), lambda database: usage_lines(database, days)):
        typer.echo(line)


@database_app.command("upgrade")
def database_upgrade(data: DataOption = None) -> None:
    """Bring the database's schema up to date."""
    from migrations.upgrade import upgrade

    settings = load_settings(data=data)
    open_private_folder(settings.data_dir)
    upgrade(settings.resolved_database_url())
    typer.echo("the schema is up to date")


if __name__ == "__main__":
    app()
