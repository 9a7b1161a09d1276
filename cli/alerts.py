"""``weft alert``: an operator sees which tenants' budgets are nearly spent, or are."""

from typing import Annotated

import typer

from api.admin.alerts import AlertBody
from cli.admin_client import AdminClient
from cli.admin_command import Shown, admin_command
from cli.options import AfterOption, LimitOption
from cli.tenants import find_tenant

app = typer.Typer()


@admin_command(app, "list")
def list_all(
    admin: AdminClient,
    tenant: Annotated[str | None, typer.Option(help="Name of the tenant; default: all.")] = None,
    limit: LimitOption = 50,
    after: AfterOption = None,
) -> Shown:
    """List alerts of budgets, the newest first: time, tenant, whose budget, period, percent of the amount that were spent."""
    owner = None if tenant is None else find_tenant(admin, tenant).id
    found = admin.page("/alerts", AlertBody, tenant_id=owner, limit=limit, after=after)
    return Shown(found, [_line(one) for one in found.items])


def _line(one: AlertBody) -> str:
    whose = "tenant" if one.key is None else f"key {one.key}"
    whose = whose if one.project is None else f"project {one.project}"
    of = f"{one.percent}% of {one.amount} {one.currency or 'tokens'}"
    return "\t".join([f"{one.at:%Y-%m-%d %H:%M:%S}", one.tenant, whose, one.period, of])
