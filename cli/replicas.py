"""``weft replica``: an operator's directives for single replicas of a base model."""

from typing import Annotated

import typer

from api.admin.replicas import NewDirective, ReplicaBody
from cli.admin_client import AdminClient, segment
from cli.admin_command import Done, Shown, admin_command
from store.tables import ReplicaCondition
from tenants.replica_directives import ReplicaDirective

app = typer.Typer()

BaseOption = Annotated[str, typer.Option(help="The base model.")]
ReplicaArgument = Annotated[str, typer.Argument(help="The replica's name, as in logs and samples' reports.")]
ReasonOption = Annotated[str, typer.Option(help="Reason that `weft replica show` prints.")]


@admin_command(app, "drain")
def drain(admin: AdminClient, replica: ReplicaArgument, base: BaseOption, reason: ReasonOption = "") -> Shown:
    """Send the replica no new samples. The samples that it works on end there."""
    return _direct(admin, replica, base, ReplicaDirective.DRAIN, reason)


@admin_command(app, "sleep")
def sleep(admin: AdminClient, replica: ReplicaArgument, base: BaseOption, reason: ReasonOption = "") -> Shown:
    """Drain the replica, then have its server free the accelerator's memory (vLLM with --enable-sleep-mode)."""
    return _direct(admin, replica, base, ReplicaDirective.SLEEP, reason)


@admin_command(app, "work")
def work(admin: AdminClient, replica: ReplicaArgument, base: BaseOption) -> Shown:
    """Wake the replica and send it samples again. A replica that works is left alone."""
    admin.delete(f"/replicas/{segment(replica)}", base_model=base)
    return Shown(Done(done="work"), [f"{replica}\tworks"])


@admin_command(app, "show")
def show(admin: AdminClient, base: BaseOption) -> Shown:
    """List the standing directives. A replica without one works."""
    found = admin.page("/replicas", ReplicaBody, base_model=base)
    found.items = [one for one in found.items if one.directive is not None]
    return Shown(found, [_standing(one) for one in found.items])


@admin_command(app, "list")
def list_all(
    admin: AdminClient, base: Annotated[str | None, typer.Option(help="The base model; default: all.")] = None
) -> Shown:
    """List replicas: base model, name, state, samples in flight, the reason of a directive."""
    found = admin.page("/replicas", ReplicaBody, base_model=base)
    lines = [
        f"{one.base_model}\t{one.replica}\t{_state(one)}\t{one.in_flight} in flight\t{one.reason or ''}"
        for one in found.items
    ]
    return Shown(found, lines)


def _direct(admin: AdminClient, replica: str, base: str, directive: ReplicaDirective, reason: str) -> Shown:
    asked = NewDirective(base_model=base, directive=directive, reason=reason)
    found = admin.send("PUT", f"/replicas/{segment(replica)}", ReplicaBody, asked)
    if found.process is None:
        typer.echo(
            f"weft: no process reports a replica of that name; `weft replica list --base {base}` shows them", err=True
        )
    return Shown(found, [f"{replica}\t{directive}"])


def _standing(one: ReplicaBody) -> str:
    since = "-" if one.since is None else f"{one.since:%Y-%m-%d %H:%M}"
    return f"{one.replica}\t{one.directive}\t{since}\t{one.reason or ''}"


def _state(one: ReplicaBody) -> str:
    if not one.is_alive:
        return "dead"
    if one.condition is ReplicaCondition.DOWN:
        return "down"
    if one.condition is ReplicaCondition.CANNOT_SLEEP:
        return "drained, cannot sleep"
    if one.directive is None:
        return "works"
    return one.directive if one.process is not None else "directed, not seen"
