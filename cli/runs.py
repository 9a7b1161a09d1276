"""``weft run``: an operator lists runs, looks at one and its history, has it moved to another trainer or paged out."""

from typing import Annotated

import typer

from api.admin.bodies import ReasonBody
from api.admin.runs import DirectedRunBody, MoveRequest, NewWeight, Outcome, RunBody, RunDetails
from cli.admin_client import AdminClient, segment
from cli.admin_command import Shown, admin_command
from cli.options import AfterOption, LimitOption
from cli.tenants import find_tenant
from cli.wait_lines import wait_lines
from contracts.plurals import counted
from store.tables import RunState
from tenants.run_history import MOST_EVENTS

app = typer.Typer()

RunArgument = Annotated[str, typer.Argument(help="The run's id: the SDK's model id.")]
ReasonOption = Annotated[str, typer.Option(help="Reason for the run's history.")]


@admin_command(app, "list")
def list_all(
    admin: AdminClient,
    tenant: Annotated[str | None, typer.Option(help="Name of their tenant.")] = None,
    base: Annotated[str | None, typer.Option(help="Their base model.")] = None,
    trainer: Annotated[str | None, typer.Option(help="Id of the trainer that has them.")] = None,
    state: Annotated[RunState | None, typer.Option(help="Their state.")] = None,
    limit: LimitOption = 50,
    after: AfterOption = None,
) -> Shown:
    """List runs in order of their ids: id, state, base model, rank, trainer, steps, last request."""
    tenant_id = None if tenant is None else find_tenant(admin, tenant).id
    found = admin.page(
        "/runs",
        RunBody,
        tenant_id=tenant_id,
        base_model=base,
        trainer=trainer,
        state=state,
        limit=limit,
        after=after,
    )
    return Shown(found, [_line(one) for one in found.items])


@admin_command(app, "show")
def show(
    admin: AdminClient,
    run: RunArgument,
    most: Annotated[int, typer.Option("--events", min=1, max=MOST_EVENTS, help="Most events, the newest first.")] = 20,
) -> Shown:
    """Show a run: its state, its trainer, what an operator wants of it, and its history."""
    found = admin.get(f"/runs/{segment(run)}", RunDetails, events=most)
    wanted = found.directive
    shown = {
        "id": found.id,
        "tenant": found.tenant,
        "base model": found.base_model,
        "rank": found.rank,
        "state": found.state,
        "trainer": found.trainer_id or "none",
        "fencing token": found.lease_token,
        "next seq_id": found.next_seq_id,
        "snapshot up to": found.snapshot_seq_id,
        "weight": f"{found.weight:g}",
        "pending": found.pending,
        "last request": f"{found.last_request_at:%Y-%m-%d %H:%M:%S}",
        "directive": wanted and f"{wanted.directive} {wanted.target or ''}".rstrip(),
    }
    lines = [f"{name}\t{value}" for name, value in shown.items() if value is not None] + wait_lines(found.waiting)
    lines += [
        f"{event.at:%Y-%m-%d %H:%M:%S}\t{event.kind}\t{event.trainer or ''}\t{event.lease_token}\t{event.detail or ''}"
        for event in found.events
    ]
    return Shown(found, lines)


@admin_command(app, "move")
def move(
    admin: AdminClient,
    run: RunArgument,
    to: Annotated[str | None, typer.Option(help="The trainer's id, or its beginning. Default: any other one.")] = None,
    reason: ReasonOption = "",
) -> Shown:
    """Have the run's trainer hand it to another one, in order: what is under way ends, and nothing is replayed."""
    asked = MoveRequest(to=to, reason=reason)
    found = admin.send("POST", f"/runs/{segment(run)}/move", DirectedRunBody, asked)
    return Shown(found, [_outcome(found)])


@admin_command(app, "weigh")
def weigh(
    admin: AdminClient,
    run: RunArgument,
    weight: Annotated[float, typer.Argument(help="Weight, 0.01 to 100; a run begins with 1.")],
) -> Shown:
    """Give a run a weight among its tenant's runs: of two with work, one of weight 3 is served three times as much."""
    found = admin.send("PUT", f"/runs/{segment(run)}/weight", RunBody, NewWeight(weight=weight))
    return Shown(found, [f"{found.id}\tweight {found.weight:g}"])


@admin_command(app, "evict")
def evict(admin: AdminClient, run: RunArgument, reason: ReasonOption = "") -> Shown:
    """Have the run's adapter written to disk and its memory freed. Its next operation brings it back."""
    found = admin.send("POST", f"/runs/{segment(run)}/eviction", DirectedRunBody, ReasonBody(reason=reason))
    return Shown(found, [_outcome(found)])


def _line(one: RunBody) -> str:
    last = f"{one.last_request_at:%Y-%m-%d %H:%M:%S}"
    held = one.trainer_id or "none"
    return "\t".join(
        [one.id, one.state, one.base_model, str(one.rank), held, counted(one.optimizer_steps, "step"), last]
    )


def _outcome(found: DirectedRunBody) -> str:
    told = {
        Outcome.MOVES: f"moves from {found.trainer}",
        Outcome.ASSIGNED: f"is {found.trainer}'s",
        Outcome.IS_THERE: f"is {found.trainer}'s already",
        Outcome.LEAVES: f"leaves the memory of {found.trainer}",
        Outcome.NOT_RESIDENT: "is in no trainer's memory",
    }
    return f"{found.id}\t{told.get(found.outcome, found.outcome)}"
