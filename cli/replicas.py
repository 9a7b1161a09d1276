"""Replicas from the command line: an operator's order for one of a base model's replicas."""

from typing import Annotated

import typer

from cli.administration import on_database
from cli.options import DataOption, load_settings, run_or_explain
from store.clock import utc_now
from store.database import Database
from tenants.replica_directives import ReplicaDirective, direct_replica, lift_directive, standing_directives

app = typer.Typer(
    help="Drain replicas or put them to sleep. A running service follows within seconds.", no_args_is_help=True
)

BaseOption = Annotated[str, typer.Option(help="The base model.")]
ReplicaArgument = Annotated[str, typer.Argument(help="The replica's name, as logs and samples' reports have it.")]
ReasonOption = Annotated[str, typer.Option(help="For whoever looks.")]


@app.command("drain")
def drain(replica: ReplicaArgument, base: BaseOption, reason: ReasonOption = "", data: DataOption = None) -> None:
    """No new samples for the replica; what it works on ends there."""
    _order(replica, base, ReplicaDirective.DRAIN, reason, data)


@app.command("sleep")
def sleep(replica: ReplicaArgument, base: BaseOption, reason: ReasonOption = "", data: DataOption = None) -> None:
    """Drain it, then have its server free the accelerator's memory (vLLM with --enable-sleep-mode)."""
    _order(replica, base, ReplicaDirective.SLEEP, reason, data)


@app.command("work")
def work(replica: ReplicaArgument, base: BaseOption, data: DataOption = None) -> None:
    """Wake it and give it samples again; harmless when it does work."""

    async def change(database: Database) -> None:
        async with database.write() as transaction:
            await lift_directive(transaction, base, replica)

    run_or_explain(lambda: on_database(load_settings(data=data), change))
    typer.echo(f"{replica}\twork")


@app.command("show")
def show(base: BaseOption, data: DataOption = None) -> None:
    """The orders that stand; replicas without one work."""

    async def look(database: Database) -> list[str]:
        async with database.read() as session:
            orders = await standing_directives(session, base)
        return [
            f"{one.replica}\t{one.directive}\t{one.since:%Y-%m-%d %H:%M}\t{one.reason or ''}" for one in orders.values()
        ]

    for line in run_or_explain(lambda: on_database(load_settings(data=data), look)):
        typer.echo(line)


def _order(replica: str, base: str, order: ReplicaDirective, reason: str, data: DataOption) -> None:
    async def change(database: Database) -> None:
        async with database.write() as transaction:
            await direct_replica(transaction, base, replica, order, reason or None, utc_now)

    run_or_explain(lambda: on_database(load_settings(data=data), change))
    typer.echo(f"{replica}\t{order}")
