"""``weft price``: adds and lists prices of tokens and storage, of the service and of single tenants."""

from collections.abc import Sequence
from typing import Annotated

import typer

from api.admin.prices import NewPriceBody, PriceBody
from cli.admin_client import AdminClient
from cli.admin_command import Shown, admin_command
from cli.tables import Table
from cli.tenants import path_of
from cli.times import moment
from store.clock import utc_now
from tenants.prices import PricedQuantity

app = typer.Typer()

TenantOption = Annotated[
    str | None, typer.Option(help="Tenant whose own prices go before those of the service; default: the service's.")
]


@admin_command(app, "add")
def add(
    admin: AdminClient,
    meter: Annotated[PricedQuantity, typer.Argument(help="What has the price.")],
    amount: Annotated[str, typer.Argument(help="Price of a million tokens, or of a GB-month of storage.")],
    base: Annotated[
        str | None, typer.Option(help="Base model; without it every base that has no price of its own.")
    ] = None,
    currency: Annotated[str, typer.Option(help="Currency; all prices have the same.")] = "USD",
    valid_from: Annotated[
        str | None,
        typer.Option("--from", help="Whole hour (UTC) from which it holds: 2027-01-31T12:00. Default: this hour."),
    ] = None,
    tenant: TenantOption = None,
) -> Shown:
    """Add a price. It holds until a later one; no price is ever changed, and none begins in the past."""
    begin = None if valid_from is None else moment(valid_from, "--from", utc_now())
    new = NewPriceBody(meter=meter, amount=amount, currency=currency, base_model=base, valid_from=begin)
    made = admin.send("POST", _path(admin, tenant), PriceBody, new)
    return Shown.of(made, _table([made]))


@admin_command(app, "list")
def list_all(admin: AdminClient, tenant: TenantOption = None) -> Shown:
    """List the prices, the oldest first: meter, base model, amount, currency, first hour."""
    found = admin.page(_path(admin, tenant), PriceBody)
    return Shown.of(found, _table(found.items))


def _path(admin: AdminClient, tenant: str | None) -> str:
    return "/prices" if tenant is None else path_of(admin, tenant, "prices")


def _table(prices: Sequence[PriceBody]) -> Table:
    rows = [
        (one.meter, one.base_model or "*", one.amount, one.currency, f"{one.valid_from:%Y-%m-%dT%H:%MZ}")
        for one in prices
    ]
    return Table(("meter", "base model", "amount", "currency", "from"), rows)
