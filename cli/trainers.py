"""``weft trainer``: an operator lists trainers, has one give up its runs, and has it work again."""

from typing import Annotated

import typer

from cli.operators import Operator, as_operator
from cli.options import DataOption
from ledger.wakeups import trainer_topic
from store.clock import utc_now
from workers.leases.drains import TrainerStanding, drain_trainer, find_trainer, list_trainers, undrain_trainer

app = typer.Typer(help="List trainers, and drain one before its machine is worked on.", no_args_is_help=True)

TrainerArgument = Annotated[str, typer.Argument(help="The trainer's id, or its beginning.")]


@app.command("list")
def list_(data: DataOption = None) -> None:
    """List trainers: id, base model, host and pid, state, runs, reason of a drain."""

    async def look(operator: Operator) -> list[TrainerStanding]:
        async with operator.database.read() as session:
            return await list_trainers(session, utc_now)

    for one in as_operator(data, look):
        typer.echo("\t".join([one.id, one.base_model, f"{one.host}:{one.pid}", *_state(one)]))


@app.command("drain")
def drain(
    trainer: TrainerArgument,
    reason: Annotated[str, typer.Option(help="Reason that `weft trainer list` shows.")] = "",
    data: DataOption = None,
) -> None:
    """Have a trainer hand its runs to others in order, and take none. It can be ended once it has none."""

    async def change(operator: Operator) -> str:
        async with operator.database.write() as transaction:
            found = await find_trainer(transaction, trainer, utc_now)
            await drain_trainer(transaction, found.id, reason=reason or None, now=utc_now())
            others = [
                one
                for one in await list_trainers(transaction, utc_now)
                if one.base_model == found.base_model and one.is_alive and one.drained_at is None
            ]
        operator.wakeups.announce(trainer_topic(found.id))
        note = "" if others else f"\tno other trainer of {found.base_model} takes runs: their work waits for one"
        return f"{found.id}\tgives up {found.runs} runs{note}"

    typer.echo(as_operator(data, change))


@app.command("work")
def work(trainer: TrainerArgument, data: DataOption = None) -> None:
    """Have a drained trainer take runs again."""

    async def change(operator: Operator) -> str:
        async with operator.database.write() as transaction:
            found = await find_trainer(transaction, trainer, utc_now)
            await undrain_trainer(transaction, found.id)
        return f"{found.id}\ttakes runs"

    typer.echo(as_operator(data, change))


def _state(one: TrainerStanding) -> list[str]:
    state = "dead" if not one.is_alive else "works" if one.drained_at is None else "drained"
    return [state, f"{one.runs} runs", one.reason or ""]
