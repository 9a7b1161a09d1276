"""``weft session``: an operator lists, shows and ends clients' sessions."""

from typing import Annotated

import typer

from api.admin.bodies import ReasonBody
from api.admin.sessions import EndedSession, SessionBody, SessionDetails
from cli.admin_client import AdminClient, segment
from cli.admin_command import Shown, admin_command
from cli.options import AfterOption, LimitOption
from cli.tenants import find_tenant
from contracts.plurals import counted

app = typer.Typer()

SessionArgument = Annotated[str, typer.Argument(help="The session's id: the beginning of its runs' ids.")]


@admin_command(app, "list")
def list_all(
    admin: AdminClient,
    tenant: Annotated[str | None, typer.Option(help="Name of their tenant.")] = None,
    is_open: Annotated[bool | None, typer.Option("--open/--ended", help="Open or ended ones only.")] = None,
    limit: LimitOption = 50,
    after: AfterOption = None,
) -> Shown:
    """List sessions in order of their ids: id, state, SDK, last sign of life."""
    tenant_id = None if tenant is None else find_tenant(admin, tenant).id
    found = admin.page("/sessions", SessionBody, tenant_id=tenant_id, is_open=is_open, limit=limit, after=after)
    return Shown(found, [_line(one) for one in found.items])


@admin_command(app, "show")
def show(admin: AdminClient, session: SessionArgument) -> Shown:
    """Show a session with its runs and samplers."""
    found = admin.get(f"/sessions/{segment(session)}", SessionDetails)
    lines = [_line(found), f"tenant\t{found.tenant_id}", f"project\t{found.project or 'default'}"]
    lines += [f"run\t{one}" for one in found.runs] + [f"sampler\t{one}" for one in found.samplers]
    return Shown(found, lines)


@admin_command(app, "end")
def end(
    admin: AdminClient,
    session: SessionArgument,
    reason: Annotated[str, typer.Option(help="Reason that the tenant reads.")] = "",
) -> Shown:
    """End a session: its client is told to stop, and what it has pending is cancelled. Checkpoints stay."""
    found = admin.send("POST", f"/sessions/{segment(session)}/end", EndedSession, ReasonBody(reason=reason))
    return Shown(found, [f"{session}\tended\t{counted(found.cancelled, 'operation')} cancelled"])


def _line(one: SessionBody) -> str:
    state = "open" if one.ended_at is None else f"{one.end_reason} {one.ended_at:%Y-%m-%d %H:%M:%S}"
    return "\t".join([one.id, state, one.sdk_version or "-", f"{one.last_seen_at:%Y-%m-%d %H:%M:%S}"])
