"""``weft operation``: an operator looks at operations, and ends one or has it begun anew."""

from datetime import datetime
from typing import Annotated

import typer

from cli.operators import Operator, as_operator
from cli.options import DataOption
from contracts.errors import Cancelled, EngineFailure, InvalidRequest, WeftError
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from ledger.cancellation import OfOperation
from ledger.inspection import (
    MOST_OPERATIONS,
    InspectedOperation,
    OperationFilter,
    inspect_operation,
    list_operations,
)
from ledger.requeue import requeue_operation
from ledger.wakeups import recalls_topic, sampling_topic
from store.clock import utc_now
from store.database import after_commit
from workers.leases.processes import database_now

app = typer.Typer(help="Look at operations: what waits and why. End one, or have it begun anew.", no_args_is_help=True)

OperationArgument = Annotated[str, typer.Argument(help="The operation's id: the SDK's request id.")]
ReasonOption = Annotated[str, typer.Option(help="Reason that the tenant reads.")]


@app.command("list")
def list_(
    state: Annotated[OperationState, typer.Option(help="State of the operations.")] = OperationState.PENDING,
    tenant: Annotated[str | None, typer.Option(help="Name of their tenant.")] = None,
    lane: Annotated[str | None, typer.Option("--run", help="Their run's or sampler's id.")] = None,
    kind: Annotated[OperationKind | None, typer.Option(help="Their kind.")] = None,
    most: Annotated[int, typer.Option("--limit", min=1, max=MOST_OPERATIONS, help="Most lines.")] = 50,
    data: DataOption = None,
) -> None:
    """List operations: pending ones oldest first with what each waits for, others newest first with their error.

    Done operations are looked for in the given run, or else among the last 10,000 that were accepted.
    """

    async def look(operator: Operator) -> list[str]:
        async with operator.database.read() as session:
            now = await database_now(session, utc_now)
            which = OperationFilter(state, tenant, lane, kind)
            return [_line(one, now) for one in await list_operations(session, which, most=most, now=now)]

    for line in as_operator(data, look):
        typer.echo(line)


@app.command("show")
def show(operation: OperationArgument, data: DataOption = None) -> None:
    """Show one operation: where it belongs, its age, attempts, and what it waits for or how it ended."""

    async def look(operator: Operator) -> list[str]:
        async with operator.database.read() as session:
            now = await database_now(session, utc_now)
            return _lines(await inspect_operation(session, operation, now=now), now)

    for line in as_operator(data, look):
        typer.echo(line)


@app.command("cancel")
def cancel(operation: OperationArgument, reason: ReasonOption = "", data: DataOption = None) -> None:
    """End a pending operation. Its tenant reads that it was cancelled; its run goes on with the next."""
    _end(operation, Cancelled(_told("cancelled by the service's operator", reason)), data)


@app.command("fail")
def fail(operation: OperationArgument, reason: ReasonOption = "", data: DataOption = None) -> None:
    """End a pending operation as the service's own failure; its run goes on with the next."""
    _end(operation, EngineFailure(_told("the service's operator has failed this operation", reason)), data)


@app.command("requeue")
def requeue(operation: OperationArgument, data: DataOption = None) -> None:
    """Have a pending operation begun anew: claims and attempts are forgotten, and its run is rebuilt from the ledger.

    An operation that is done keeps its result. Requeue one at which trainers died when they replayed it.
    """

    async def change(operator: Operator) -> None:
        async with operator.database.write() as transaction:
            found = await requeue_operation(transaction, operation)
            is_sample = found.kind is OperationKind.SAMPLE
            topics = [sampling_topic(found.base_model)] if is_sample else []
            topics += [recalls_topic(found.trainer)] if found.trainer is not None else []
            for topic in topics:
                after_commit(transaction, lambda topic=topic: operator.wakeups.announce(topic))  # type: ignore[misc]

    as_operator(data, change)
    typer.echo(f"{operation}\trequeued")


def _end(operation: str, error: WeftError, data: DataOption) -> None:
    async def change(operator: Operator) -> None:
        async with operator.database.write() as transaction:
            if not await operator.ledger.cancel(transaction, OfOperation(operation), error):
                found = await inspect_operation(transaction, operation, now=utc_now())
                what = "an unload is never ended" if found.state is OperationState.PENDING else f"it is {found.state}"
                raise InvalidRequest(f"operation {operation[:100]} was not ended: {what}")

    as_operator(data, change)
    typer.echo(f"{operation}\t{error.code}")


def _told(what: str, reason: str) -> str:
    return f"{what}: {reason}" if reason else what


def _line(one: InspectedOperation, now: datetime) -> str:
    end = one.error_message or "" if one.wait is None else f"{one.wait.reason}: {one.wait.text}"
    age = f"{(now - one.created_at).total_seconds():.0f} s"
    return "\t".join([one.id, one.tenant, one.kind, f"{one.lane}#{one.seq_id}", one.state, age, end])


def _lines(one: InspectedOperation, now: datetime) -> list[str]:
    shown = {
        "id": one.id,
        "tenant": one.tenant,
        "kind": one.kind,
        "lane": one.lane,
        "seq_id": one.seq_id,
        "base model": one.base_model,
        "state": one.state,
        "accepted": f"{one.created_at:%Y-%m-%d %H:%M:%S} ({(now - one.created_at).total_seconds():.0f} s ago)",
        "ended": one.finished_at and f"{one.finished_at:%Y-%m-%d %H:%M:%S}",
        "tokens": one.tokens,
        "attempts": one.attempts,
        "trace": one.trace_id,
        "waits": one.wait and f"{one.wait.reason}: {one.wait.text}",
        "error": one.error_code and f"{one.error_code}: {one.error_message}",
    }
    return [f"{name}\t{value}" for name, value in shown.items() if value is not None]
