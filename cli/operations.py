"""``weft operation``: an operator looks at operations, and ends one or has it begun anew."""

from typing import Annotated

import typer

from api.admin.bodies import MOST_ROWS, ReasonBody
from api.admin.operations import OperationBody, TouchedOperation
from cli.admin_client import AdminClient, segment
from cli.admin_command import Shown, admin_command
from cli.options import AfterOption
from cli.wait_lines import wait_lines
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind

app = typer.Typer()

OperationArgument = Annotated[str, typer.Argument(help="The operation's id: the SDK's request id.")]
ReasonOption = Annotated[str, typer.Option(help="Reason that the tenant reads.")]


@admin_command(app, "list")
def list_all(
    admin: AdminClient,
    state: Annotated[OperationState, typer.Option(help="State of the operations.")] = OperationState.PENDING,
    tenant: Annotated[str | None, typer.Option(help="Name of their tenant.")] = None,
    lane: Annotated[str | None, typer.Option("--run", help="Their run's or sampler's id.")] = None,
    kind: Annotated[OperationKind | None, typer.Option(help="Their kind.")] = None,
    most: Annotated[int, typer.Option("--limit", min=1, max=MOST_ROWS, help="Most lines.")] = 50,
    after: AfterOption = None,
) -> Shown:
    """List operations: pending ones oldest first with what each waits for, others newest first with their error.

    Done operations are looked for in the given run, or else among the last 10,000 that were accepted.
    """
    found = admin.page(
        "/operations", OperationBody, state=state, tenant=tenant, lane=lane, kind=kind, limit=most, after=after
    )
    return Shown(found, [_line(one) for one in found.items])


@admin_command(app, "show")
def show(admin: AdminClient, operation: OperationArgument) -> Shown:
    """Show one operation: where it belongs, its age, attempts, and what it waits for or how it ended."""
    found = admin.get(f"/operations/{segment(operation)}", OperationBody)
    return Shown(found, _lines(found))


@admin_command(app, "cancel")
def cancel(admin: AdminClient, operation: OperationArgument, reason: ReasonOption = "") -> Shown:
    """End a pending operation. Its tenant reads that it was cancelled; its run goes on with the next."""
    return _touched(admin, operation, "cancellation", ReasonBody(reason=reason))


@admin_command(app, "fail")
def fail(admin: AdminClient, operation: OperationArgument, reason: ReasonOption = "") -> Shown:
    """End a pending operation as the service's own failure; its run goes on with the next."""
    return _touched(admin, operation, "failure", ReasonBody(reason=reason))


@admin_command(app, "requeue")
def requeue(admin: AdminClient, operation: OperationArgument) -> Shown:
    """Have a pending operation begun anew: claims and attempts are forgotten, and its run is rebuilt from the ledger.

    An operation that is done keeps its result. Requeue one at which trainers died when they replayed it.
    """
    return _touched(admin, operation, "requeue", None)


def _touched(admin: AdminClient, operation: str, how: str, body: ReasonBody | None) -> Shown:
    found = admin.send("POST", f"/operations/{segment(operation)}/{how}", TouchedOperation, body)
    return Shown(found, [f"{operation}\t{found.error_code or 'requeued'}"])


def _line(one: OperationBody) -> str:
    end = one.error_message or "" if one.wait is None else f"{one.wait.reason}: {one.wait.text}"
    age = f"{one.age_seconds:.0f} s"
    return "\t".join([one.id, one.tenant, one.kind, f"{one.lane}#{one.seq_id}", one.state, age, end])


def _lines(one: OperationBody) -> list[str]:
    shown = {
        "id": one.id,
        "tenant": one.tenant,
        "kind": one.kind,
        "lane": one.lane,
        "seq_id": one.seq_id,
        "base model": one.base_model,
        "state": one.state,
        "accepted": f"{one.created_at:%Y-%m-%d %H:%M:%S} ({one.age_seconds:.0f} s ago)",
        "ended": one.finished_at and f"{one.finished_at:%Y-%m-%d %H:%M:%S}",
        "tokens": one.tokens,
        "attempts": one.attempts,
        "trace": one.trace_id,
        "error": one.error_code and f"{one.error_code}: {one.error_message}",
    }
    return [f"{name}\t{value}" for name, value in shown.items() if value is not None] + wait_lines(one.wait)
