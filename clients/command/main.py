"""The ``weft`` command. Subcommands import what they need, so that ``weft --help`` stays quick."""

import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from clients.command import gates, replicas
from clients.command.options import BaseOption, DataOption, HostOption, PortOption, load_settings, run_or_explain
from tenants.settings import Settings

app = typer.Typer(help="weft: multi-tenant LoRA training behind the Tinker API.", no_args_is_help=True)
tenant_app = typer.Typer(help="Tenants of this service.", no_args_is_help=True)
key_app = typer.Typer(help="API keys.", no_args_is_help=True)
model_app = typer.Typer(help="Base models.", no_args_is_help=True)
database_app = typer.Typer(help="The database.", no_args_is_help=True)
app.add_typer(tenant_app, name="tenant")
app.add_typer(key_app, name="key")
app.add_typer(model_app, name="model")
app.add_typer(database_app, name="db")
app.add_typer(gates.app, name="gate")
app.add_typer(replicas.app, name="replica")


def _on_database(settings: Settings, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    from clients.command.administration import on_database

    return run_or_explain(lambda: on_database(settings, work))


@app.command()
def serve(
    base_model: BaseOption = None, data: DataOption = None, host: HostOption = None, port: PortOption = None
) -> None:
    """Run the whole service in this process: API, trainer and sampler on SQLite and a data folder."""
    # Trainer and sampler have thread pools of their own: idle OpenMP threads that spin for long take each other's cores, and
    # threads that sleep at once are late for each of many small products. OpenMP reads this when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from clients.command.serve import run

    settings = load_settings(data=data, base_models=base_model, host=host, port=port)
    run_or_explain(lambda: run(settings))


@app.command()
def doctor(
    base_model: BaseOption = None, data: DataOption = None, host: HostOption = None, port: PortOption = None
) -> None:
    """Check settings, database, base models and port, and say how to mend what is wrong."""
    from clients.command.doctor import examine

    findings = examine(load_settings(data=data, base_models=base_model, host=host, port=port))
    for finding in findings:
        typer.echo(f"{'ok  ' if finding.is_well else 'FAIL'} {finding.part}: {finding.text}")
    if not all(finding.is_well for finding in findings):
        raise typer.Exit(1)


@model_app.command("tiny")
def model_tiny(directory: Path, seed: int = 0) -> None:
    """Write a tiny random-weight Qwen3 with a byte-level tokenizer: a base to try weft with."""
    from engine.training.tiny_model import write_tiny_model

    run_or_explain(lambda: write_tiny_model(directory, seed=seed))
    typer.echo(f"wrote {directory}; try: weft serve --base-model {directory}")


@tenant_app.command("create")
def tenant_create(name: str, data: DataOption = None) -> None:
    """Make a tenant and its first key; the key is shown once."""
    from clients.command.administration import new_tenant

    secret = _on_database(load_settings(data=data), lambda database: new_tenant(database, name))
    typer.echo(secret)


@tenant_app.command("list")
def tenant_list(data: DataOption = None) -> None:
    """List tenants."""
    from clients.command.administration import tenant_lines

    for line in _on_database(load_settings(data=data), tenant_lines):
        typer.echo(line)


@key_app.command("create")
def key_create(
    tenant: Annotated[str, typer.Option(help="Name of the tenant.")] = "default",
    note: Annotated[str, typer.Option(help="What the key is for.")] = "",
    data: DataOption = None,
) -> None:
    """Make a key; it is shown once."""
    from clients.command.administration import new_key

    typer.echo(_on_database(load_settings(data=data), lambda database: new_key(database, tenant, note)))


@key_app.command("list")
def key_list(
    tenant: Annotated[str, typer.Option(help="Name of the tenant.")] = "default", data: DataOption = None
) -> None:
    """List a tenant's keys by their first characters."""
    from clients.command.administration import key_lines

    for line in _on_database(load_settings(data=data), lambda database: key_lines(database, tenant)):
        typer.echo(line)


@key_app.command("revoke")
def key_revoke(
    key: Annotated[str, typer.Argument(help="The key, or its first part as `weft key list` shows it.")],
    data: DataOption = None,
) -> None:
    """Revoke a key at once."""
    from clients.command.administration import end_key

    _on_database(load_settings(data=data), lambda database: end_key(database, key))
    typer.echo("revoked")


@database_app.command("upgrade")
def database_upgrade(data: DataOption = None) -> None:
    """Bring the schema up to date."""
    from migrations.upgrade import upgrade

    settings = load_settings(data=data)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    upgrade(settings.resolved_database_url())
    typer.echo("the schema is up to date")


if __name__ == "__main__":
    app()
