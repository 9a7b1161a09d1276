"""Prices of tokens and storage, of the service and of single tenants, for operators: list them and add one."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.acts import record_operator
from api.admin.bodies import Listed, PathId, operator_body
from api.admin.repeats import Once
from api.admin.services import Admin, AdminServices, Caller
from api.admin.tenants import find_row
from api.wire.request_model import PlainText, RequestModel, UtcTime
from contracts.ids import TenantId
from tenants.audit_actions import Action
from tenants.operator_keys import Operator
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity, PriceLine, cost_text, tariff

router = APIRouter(tags=["prices"])


class NewPriceBody(RequestModel):
    """A price of a million tokens or of a GB-month, as decimal text, from a whole hour on, by default this one.

    Without ``base_model`` it is for every base that has no price of its own.
    """

    meter: PricedQuantity
    amount: Annotated[PlainText, Field(max_length=50)]
    currency: Annotated[PlainText, Field(max_length=20)] = "USD"
    base_model: Annotated[PlainText, Field(min_length=1, max_length=500)] | None = None
    valid_from: UtcTime | None = None


class PriceBody(BaseModel):
    """A price. ``base_model`` null: of every base that has none of its own."""

    meter: PricedQuantity
    base_model: str | None
    amount: str
    currency: str
    valid_from: datetime


@router.get("/prices")
async def list_prices(caller: Caller, admin: Admin) -> Listed[PriceBody]:
    """List the prices of the service, the oldest first; all in one page."""
    del caller
    async with admin.runtime.database.read() as session:
        return Listed(items=[_body(line) for line in (await tariff(session)).lines])


@router.post("/prices")
async def make_price(
    caller: Caller,
    admin: Admin,
    request: Request,
    body: Annotated[NewPriceBody, operator_body(NewPriceBody)],
    repeats: Once,
) -> PriceBody:
    """Add a price. None is ever changed, and none begins in the past. Raises ``InvalidRequest``."""
    now = await admin.now()
    async with admin.runtime.database.write() as transaction:

        async def make() -> PriceBody:
            return await _add(transaction, admin, request, caller, body, None, now)

        return await repeats.once(transaction, body, PriceBody, make)


@router.get("/tenants/{tenant_id}/prices")
async def list_tenants_prices(caller: Caller, admin: Admin, tenant_id: PathId) -> Listed[PriceBody]:
    """List a tenant's own prices, the oldest first; all in one page. Raises ``NotFound``."""
    del caller
    async with admin.runtime.database.read() as session:
        tenant = TenantId((await find_row(session, tenant_id)).id)
        return Listed(items=[_body(line) for line in (await tariff(session, tenant)).own])


@router.post("/tenants/{tenant_id}/prices")
async def make_tenants_price(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    body: Annotated[NewPriceBody, operator_body(NewPriceBody)],
    repeats: Once,
) -> PriceBody:
    """Add a price of a tenant's own, which goes before every price of the service. Raises ``NotFound``, ``InvalidRequest``."""
    now = await admin.now()
    async with admin.runtime.database.write() as transaction:
        tenant = TenantId((await find_row(transaction, tenant_id)).id)

        async def make() -> PriceBody:
            return await _add(transaction, admin, request, caller, body, tenant, now)

        return await repeats.once(transaction, body, PriceBody, make)


async def _add(
    transaction: AsyncSession,
    admin: AdminServices,
    request: Request,
    caller: Operator,
    body: NewPriceBody,
    tenant: TenantId | None,
    now: datetime,
) -> PriceBody:
    new = NewPrice(**body.model_dump(), tenant=tenant)
    added = await add_price(transaction, new, lambda: now)
    made = _body(added)
    after = made.model_dump(exclude={"meter"})
    await record_operator(
        transaction, admin, request, caller, Action.PRICE_ADD, added.meter, tenant=tenant, after=after
    )
    return made


def _body(line: PriceLine) -> PriceBody:
    return PriceBody(
        meter=line.meter,
        base_model=line.base_model,
        amount=cost_text(line.amount) or "0",
        currency=line.currency,
        valid_from=line.valid_from,
    )
