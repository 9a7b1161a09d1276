"""Budgets of tenants, of their keys and of their projects, for operators."""

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.acts import record_operator
from api.admin.bodies import PathId, operator_body
from api.admin.services import Admin, Caller
from api.admin.tenants import find_row
from api.standing_records import StandingReport, standing_report
from api.wire.request_model import PlainText, RequestModel
from contracts.errors import InvalidRequest, NotFound
from contracts.ids import TenantId
from store.tables import ApiKey
from tenants.audit_actions import Action
from tenants.budget_settings import MOST, BudgetName, amount_of, set_budget
from tenants.budgets import Period
from tenants.keys import named_key
from tenants.projects import find_projects
from tenants.standing import standing

router = APIRouter(tags=["tenants"])


class NewBudget(RequestModel):
    """A budget in tokens, or with ``currency`` in money, as decimal text. An amount of null takes it away.

    It is the whole tenant's, or that of the key that begins so, or of the project of that name or id.
    """

    amount: Annotated[int, Field(ge=1, le=MOST)] | Annotated[PlainText, Field(max_length=50)] | None
    key: Annotated[PlainText, Field(max_length=200)] | None = None
    project: Annotated[PlainText, Field(max_length=200)] | None = None
    currency: Annotated[PlainText, Field(min_length=3, max_length=3)] | None = None


@router.put("/tenants/{tenant_id}/budgets/{period}")
async def change_budget(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    period: Period,
    body: Annotated[NewBudget, operator_body(NewBudget)],
) -> StandingReport:
    """Give a tenant, one of its keys or one of its projects a budget. What was used in the period before counts.

    Raises ``NotFound``, ``Forbidden`` for a project that there is not, ``InvalidRequest`` for an amount or a currency that is
    none.
    """
    if body.key is not None and body.project is not None:
        raise InvalidRequest("a budget is of a key or of a project, not of both; leave one of them out")
    amount = amount_of(body.amount) if isinstance(body.amount, str) else body.amount
    now = await admin.now()
    async with admin.runtime.database.write() as transaction:
        tenant = TenantId((await find_row(transaction, tenant_id, for_change=True)).id)
        key = None if body.key is None else await _key(transaction, tenant, body.key)
        project = None if body.project is None else min(await find_projects(transaction, tenant, [body.project]))
        name = BudgetName(period, None if key is None else key.id, project, body.currency)
        await set_budget(transaction, tenant, name, amount, now)
        told = {
            "period": period,
            "amount": None if body.amount is None else str(amount) if body.currency else amount,
            "key": None if key is None else key.prefix,
            "project": project,
            "currency": body.currency,
        }
        await record_operator(
            transaction,
            admin,
            request,
            caller,
            Action.TENANT_BUDGET,
            tenant,
            tenant=tenant,
            project=project,
            after=told,
        )
        return standing_report(await standing(transaction, tenant, admin.limits, now, requests=admin.request_rates))


async def _key(transaction: AsyncSession, tenant: TenantId, begin: str) -> ApiKey:
    key = await named_key(transaction, begin)
    if key.tenant_id != tenant:
        raise NotFound(f"no key of this tenant starts with {key.prefix!r}; `weft key list` shows them")
    return key
