"""``weft project``: makes, lists and bounds tenants' projects."""

from typing import Annotated

import typer

from api.project_records import NewProject, NewProjectLimits, ProjectBody
from cli.admin_client import AdminClient, segment
from cli.admin_command import Shown, admin_command
from cli.tenants import parsed_limit, path_of

app = typer.Typer()

TenantOption = Annotated[str, typer.Option(help="Name of the tenant.")]


@admin_command(app, "create")
def create(
    admin: AdminClient,
    name: Annotated[str, typer.Argument(help="Name of the project.")],
    tenant: TenantOption = "default",
) -> Shown:
    """Make a project and print its id; one of that name is left as it is."""
    made = admin.send("POST", path_of(admin, tenant, "projects"), ProjectBody, NewProject(name=name))
    return Shown(made, [made.id])


@admin_command(app, "list")
def list_all(admin: AdminClient, tenant: TenantOption = "default") -> Shown:
    """List a tenant's projects: id and name, the default one first."""
    found = admin.page(path_of(admin, tenant, "projects"), ProjectBody)
    return Shown(found, [f"{one.id}\t{one.name}" for one in found.items])


@admin_command(app, "set")
def set_limits(
    admin: AdminClient,
    name: Annotated[str, typer.Argument(help="Name or id of the project.")],
    limit: Annotated[
        list[str],
        typer.Option(metavar="NAME=VALUE", help="A limit of the project within its tenant's; VALUE may be `default`."),
    ],
    tenant: TenantOption = "default",
) -> Shown:
    """Give a project limits of its own, within its tenant's, and print all that it has."""
    change = NewProjectLimits(limits=dict(parsed_limit(one) for one in limit))
    path = path_of(admin, tenant, f"projects/{segment(name)}/limits")
    found = admin.send("PUT", path, ProjectBody, change)
    return Shown(found, [f"limit {limit}\t{value}" for limit, value in sorted(found.limits.items())] or ["no limits"])
