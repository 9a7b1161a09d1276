"""``weft tenant set`` and ``weft tenant limits``: a tenant's share, its limits and its use of them."""

from typing import Annotated

import typer

from cli.administration import on_database
from cli.options import DataOption, load_settings, run_or_explain
from contracts.errors import InvalidRequest
from store.database import Database
from tenants.keys import find_tenant
from tenants.limits import Limits, set_tenant
from tenants.standing import standing

_DEFAULT = "default"


def set_values(
    name: str,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A limit, as `weft tenant limits` names it; VALUE may be `default`."),
    ] = None,
    share: Annotated[float | None, typer.Option(help="Weight against other tenants where work is shared out.")] = None,
    data: DataOption = None,
) -> None:
    """Give a tenant limits or a share of its own. They hold from its next request on; what was accepted is kept."""
    settings = load_settings(data=data)

    async def change(database: Database) -> None:
        limits = dict(_parsed(one) for one in limit or [])
        if not limits and share is None:
            raise InvalidRequest("nothing to set; give --limit NAME=VALUE or --share")
        async with database.write() as transaction:
            await set_tenant(transaction, name=name, limits=limits, share=share)

    run_or_explain(lambda: on_database(settings, change))
    typer.echo("set")


def show(name: str, data: DataOption = None) -> None:
    """List a tenant's limits: name, value, whether it is the tenant's own, use, and what happens at the limit."""
    settings = load_settings(data=data)

    async def lines(database: Database) -> list[str]:
        async with database.read() as session:
            tenant = await find_tenant(session, name=name)
            found = await standing(session, tenant, Limits.of(settings))
        shown = [f"share\t{found.share:g}"]
        for one in found.limits:
            used = "-" if one.used is None else str(one.used)
            shown.append(f"{one.name}\t{one.value}\t{'own' if one.is_own else _DEFAULT}\t{used}\t{one.reason}")
        return shown

    for line in run_or_explain(lambda: on_database(settings, lines)):
        typer.echo(line)


def _parsed(text: str) -> tuple[str, int | None]:
    name, _, value = text.partition("=")
    if value == _DEFAULT:
        return name, None
    try:
        return name, int(value)
    except ValueError:
        raise InvalidRequest(f"--limit takes NAME=VALUE with a whole number or `default`; got {text[:100]!r}") from None
