"""``weft run``: an operator looks at a run and its history, has it moved to another trainer or paged out."""

from typing import Annotated

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from cli.operators import Operator, as_operator
from cli.options import DataOption
from contracts.errors import InvalidRequest, NotFound
from contracts.ids import RunId
from ledger.inspection import count_pending
from ledger.wakeups import trainer_topic
from store.clock import utc_now
from store.database import after_commit
from store.tables import Run, Tenant
from tenants.run_directives import RunDirective, direct_run, standing_directive
from tenants.run_history import MOST_EVENTS, run_history
from tenants.run_leases import assign_run
from workers.leases.drains import find_trainer

app = typer.Typer(help="Look at a training run and its history, move it, or page it out.", no_args_is_help=True)

RunArgument = Annotated[str, typer.Argument(help="The run's id: the SDK's model id.")]
ReasonOption = Annotated[str, typer.Option(help="Reason for the run's history.")]


@app.command("show")
def show(
    run: RunArgument,
    most: Annotated[int, typer.Option("--events", min=1, max=MOST_EVENTS, help="Most events, the newest first.")] = 20,
    data: DataOption = None,
) -> None:
    """Show a run: its state, its trainer, what an operator wants of it, and its history."""

    async def look(operator: Operator) -> list[str]:
        async with operator.database.read() as session:
            found = await _found(session, run)
            tenant = await session.get_one(Tenant, found.tenant_id)
            directive = await standing_directive(session, run)
            shown = {
                "id": found.id,
                "tenant": tenant.name,
                "base model": found.base_model,
                "rank": found.rank,
                "state": found.state,
                "trainer": found.trainer_id or "none",
                "fencing token": found.lease_token,
                "next seq_id": found.next_seq_id,
                "snapshot up to": found.snapshot_seq_id,
                "pending": await count_pending(session, run),
                "last request": f"{found.last_request_at:%Y-%m-%d %H:%M:%S}",
                "directive": directive and f"{directive.directive} {directive.target or ''}".rstrip(),
            }
            events = await run_history(session, run, most=most)
        lines = [f"{name}\t{value}" for name, value in shown.items() if value is not None]
        return lines + [
            f"{event.at:%Y-%m-%d %H:%M:%S}\t{event.kind}\t{event.trainer or ''}\t{event.lease_token}\t{event.detail or ''}"
            for event in events
        ]

    for line in as_operator(data, look):
        typer.echo(line)


@app.command("move")
def move(
    run: RunArgument,
    to: Annotated[str | None, typer.Option(help="The trainer's id, or its beginning. Default: any other one.")] = None,
    reason: ReasonOption = "",
    data: DataOption = None,
) -> None:
    """Have the run's trainer hand it to another one, in order: what is under way ends, and nothing is replayed."""

    async def change(operator: Operator) -> str:
        async with operator.database.write() as transaction:
            found = await _found(transaction, run)
            target = None if to is None else await find_trainer(transaction, to, utc_now)
            if target is not None and (target.base_model != found.base_model or not target.is_alive):
                raise InvalidRequest(f"trainer {target.id} is dead, or trains {target.base_model} only")
            if found.trainer_id is None:
                return await _assign(operator, transaction, RunId(run), None if target is None else target.id, reason)
            if target is not None and target.id == found.trainer_id:
                return f"{run}\tis {target.id}'s already"
            await direct_run(
                transaction,
                run,
                RunDirective.MOVE,
                target=None if target is None else target.id,
                reason=reason or None,
                now=utc_now(),
            )
            _wake(operator, transaction, found.trainer_id)
            return f"{run}\tmoves from {found.trainer_id}"

    typer.echo(as_operator(data, change))


@app.command("evict")
def evict(run: RunArgument, reason: ReasonOption = "", data: DataOption = None) -> None:
    """Have the run's adapter written to disk and its memory freed. Its next operation brings it back."""

    async def change(operator: Operator) -> str:
        async with operator.database.write() as transaction:
            found = await _found(transaction, run)
            if found.trainer_id is None:
                return f"{run}\tis in no trainer's memory"
            await direct_run(transaction, run, RunDirective.EVICT, reason=reason or None, now=utc_now())
            _wake(operator, transaction, found.trainer_id)
            return f"{run}\tleaves the memory of {found.trainer_id}"

    typer.echo(as_operator(data, change))


async def _assign(operator: Operator, transaction: AsyncSession, run: RunId, target: str | None, reason: str) -> str:
    """Lease a run that no trainer has to ``target``."""
    if target is None:
        raise InvalidRequest("no trainer has the run; name one with --to, or leave it to the first that is free")
    await assign_run(transaction, run, target=target, now=utc_now(), detail=reason or None)
    _wake(operator, transaction, target)
    return f"{run}\tis {target}'s"


def _wake(operator: Operator, transaction: AsyncSession, trainer: str) -> None:
    after_commit(transaction, lambda: operator.wakeups.announce(trainer_topic(trainer)))


async def _found(session: AsyncSession, run: str) -> Run:
    found = await session.get(Run, run)
    if found is None:
        raise NotFound(f"no run {run[:150]!r}; `weft operation list` shows the runs with work")
    return found
