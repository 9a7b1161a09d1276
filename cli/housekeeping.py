"""``weft housekeeping``: an operator runs housekeeping by hand, and sees when each step last succeeded."""

from typing import Annotated

import typer

from api.admin.bodies import Listed
from api.admin.housekeeping import HousekeepingRun, StepBody
from cli.admin_client import AdminClient
from cli.admin_command import Shown, admin_command
from workers.housekeeping.schedule import StepName

app = typer.Typer()

StepArgument = Annotated[StepName | None, typer.Argument(help="The step. Default: every step, one after another.")]


@admin_command(app, "run")
def run(admin: AdminClient, step: StepArgument = None) -> Shown:
    """Run one step or all, each until nothing is left. On the database of a cluster, or of any service over its admin API."""
    found = admin.carry_out("/housekeeping/runs", Listed[StepBody], HousekeepingRun(step=step))
    return Shown(found, [_outcome(one) for one in found.items], is_failure=any(one.error for one in found.items))


@admin_command(app, "status")
def status(admin: AdminClient) -> Shown:
    """Show each step's last run: when it last succeeded, how long it took, and for how long it has left work over or failed."""
    found = admin.page("/housekeeping", StepBody)
    return Shown(found, [_line(one) for one in found.items])


def _outcome(one: StepBody) -> str:
    if one.error is not None:
        return f"{one.step}\tfailed: {one.error}"
    return f"{one.step}\tdone rows={one.rows} seconds={one.seconds:.2f}"


def _line(one: StepBody) -> str:
    if not one.has_run:
        return f"{one.step}\tnever ran"
    success = "never" if one.succeeded_at is None else f"{one.succeeded_at:%Y-%m-%d %H:%M:%S}"
    state = f"{one.step}\tsuccess={success} rows={one.rows} seconds={one.seconds:.2f}"
    if one.behind_since is not None:
        state += f" left_over_since={one.behind_since:%Y-%m-%d %H:%M:%S}"
    if one.failing_since is not None:
        state += f" failing_since={one.failing_since:%Y-%m-%d %H:%M:%S}"
    return state
