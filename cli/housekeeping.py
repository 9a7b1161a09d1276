"""``weft housekeeping``: an operator runs housekeeping by hand, and sees when each step last succeeded."""

import asyncio
from typing import Annotated

import typer

from cli.administration import on_database
from cli.options import DataOption, load_settings, run_or_explain
from contracts.errors import InvalidRequest, WeftError
from store.database import Database
from store.settings import Settings
from workers.housekeeping.records import StepRecord, read_records
from workers.housekeeping.schedule import StepName

app = typer.Typer(help="Run housekeeping by hand, and see its last runs.", no_args_is_help=True)

StepArgument = Annotated[StepName | None, typer.Argument(help="The step. Default: every step, one after another.")]


@app.command("run")
def run(step: StepArgument = None, data: DataOption = None) -> None:
    """Run one step or all of a cluster, each until nothing is left. `weft serve` runs its own, since it has its files alone."""
    settings = load_settings(data=data)
    outcomes = run_or_explain(lambda: asyncio.run(_run(settings, [step] if step else list(StepName))))
    for name, outcome in outcomes.items():
        typer.echo(_outcome(name, outcome))
    if any(isinstance(outcome, BaseException) for outcome in outcomes.values()):
        raise typer.Exit(1)


@app.command("status")
def status(data: DataOption = None) -> None:
    """Show each step's last run: when it last succeeded, how long it took, and for how long it has left work over or failed."""

    async def look(database: Database) -> list[str]:
        async with database.read() as session:
            return [_line(step, record) for step, record in (await read_records(session)).items()]

    for line in run_or_explain(lambda: on_database(load_settings(data=data), look)):
        typer.echo(line)


async def _run(settings: Settings, steps: list[StepName]) -> dict[StepName, StepRecord | BaseException]:
    if settings.database_url is None or not settings.database_url.startswith("postgresql"):
        raise InvalidRequest(
            "`weft serve` keeps house by itself, every WEFT_HOUSEKEEPING_INTERVAL; restart it to do so now"
        )
    # Imported late, so that `weft --help` stays quick.
    from cli.cluster_runtime import WORKER, open_cluster
    from workers.housekeeping.housekeeping import Housekeeping

    async with open_cluster(settings, WORKER, []) as cluster:
        # This process is not in touch with the database all the while, so it declares nobody dead.
        return await Housekeeping(cluster.runtime, lambda: False).sweep(steps, until_done=True)


def _outcome(step: StepName, outcome: StepRecord | BaseException) -> str:
    if isinstance(outcome, BaseException):
        why = outcome.message if isinstance(outcome, WeftError) else type(outcome).__name__
        return f"{step}\tfailed: {why}"
    return f"{step}\tdone rows={outcome.handled} seconds={outcome.seconds:.2f}"


def _line(step: StepName, record: StepRecord | None) -> str:
    if record is None:
        return f"{step}\tnever ran"
    success = "never" if record.succeeded_at is None else f"{record.succeeded_at:%Y-%m-%d %H:%M:%S}"
    state = f"{step}\tsuccess={success} rows={record.handled} seconds={record.seconds:.2f}"
    if record.behind_since is not None:
        state += f" left_over_since={record.behind_since:%Y-%m-%d %H:%M:%S}"
    if record.failing_since is not None:
        state += f" failing_since={record.failing_since:%Y-%m-%d %H:%M:%S}"
    return state
