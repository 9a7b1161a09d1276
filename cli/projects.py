"""``weft project``: makes and lists tenants' projects."""

from typing import Annotated

import typer

from cli.administration import on_database
from cli.options import DataOption, load_settings, run_or_explain
from store.clock import utc_now
from store.database import Database
from tenants.keys import find_tenant
from tenants.projects import create_project, list_projects

app = typer.Typer(help="Make and list projects, which clients name as TINKER_PROJECT_ID.", no_args_is_help=True)

TenantOption = Annotated[str, typer.Option(help="Name of the tenant.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the project.")],
    tenant: TenantOption = "default",
    data: DataOption = None,
) -> None:
    """Make a project and print its id; one of that name is left as it is."""

    async def make(database: Database) -> str:
        async with database.write() as transaction:
            owner = await find_tenant(transaction, name=tenant)
            return (await create_project(transaction, owner, name, utc_now)).id

    typer.echo(run_or_explain(lambda: on_database(load_settings(data=data), make)))


@app.command("list")
def list_all(tenant: TenantOption = "default", data: DataOption = None) -> None:
    """List a tenant's projects: id and name, the default one first."""

    async def lines(database: Database) -> list[str]:
        async with database.read() as session:
            owner = await find_tenant(session, name=tenant)
            return [f"{one.id}\t{one.name}" for one in await list_projects(session, owner)]

    for line in run_or_explain(lambda: on_database(load_settings(data=data), lines)):
        typer.echo(line)
