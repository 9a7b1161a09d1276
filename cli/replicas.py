"""``weft replica``: an operator's directives for single replicas of a base model."""

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
ReplicaArgument = Annotated[str, typer.Argument(help="The replica's name, as in logs and samples' reports.")]
ReasonOption = Annotated[str, typer.Option(help="Reason that `weft replica show` prints.")]


@app.command("drain")
def drain(replica: ReplicaArgument, base: BaseOption, reason: ReasonOption = "", data: DataOption = None) -> None:
    """Send the replica no new samples. The samples that it works on end there."""
    _direct(replica, base, ReplicaDirective.DRAIN, reason, data)


@app.command("sleep")
def sleep(replica: ReplicaArgument, base: BaseOption, reason: ReasonOption = "", data: DataOption = None) -> None:
    """Drain the replica, then have its server free the accelerator's memory (vLLM with --enable-sleep-mode)."""
    _direct(replica, base, ReplicaDirective.SLEEP, reason, data)


@app.command("work")
def work(replica: ReplicaArgument, base: BaseOption, data: DataOption = None) -> None:
    """Wake the replica and send it samples again. A replica that works is left alone."""

    async def change(database: Database) -> None:
        async with database.write() as transaction:
            await lift_directive(transaction, base, replica)

    run_or_explain(lambda: on_database(load_settings(data=data), change))
    typer.echo(f"{replica}\twork")


@app.command("show")
def show(base: BaseOption, data: DataOption = None) -> None:
    """List the standing directives. A replica without one works."""

    async def look(database: Database) -> list[str]:
        async with database.read() as session:
            standing = await standing_directives(session, base)
        return [
            f"{one.replica}\t{one.directive}\t{one.since:%Y-%m-%d %H:%M}\t{one.reason or ''}"
            for one in standing.values()
        ]

    for line in run_or_explain(lambda: on_database(load_settings(data=data), look)):
        typer.echo(line)


def _direct(replica: str, base: str, directive: ReplicaDirective, reason: str, data: DataOption) -> None:
    async def change(database: Database) -> None:
        async with database.write() as transaction:
            await direct_replica(transaction, base, replica, directive, reason or None, utc_now)

    run_or_explain(lambda: on_database(load_settings(data=data), change))
    typer.echo(f"{replica}\t{directive}")
