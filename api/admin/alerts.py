"""Alerts of all tenants' budgets for operators."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api.admin.bodies import Limit, Listed, QueryText, listed
from api.admin.services import Admin, Caller
from api.wire.request_model import NO_NUL
from tenants.budget_alerts import AlertPlace, TenantsAlert, list_alerts
from tenants.budgets import Period
from tenants.prices import cost_text

router = APIRouter(tags=["alerts"])

AfterAlert = Annotated[str | None, Query(pattern=NO_NUL, max_length=1000)]
"""The ``next`` of the page before."""


class AlertBody(BaseModel):
    """A crossing of ``percent`` of the amount of a tenant's budget, or of that of its key or project.

    ``key``: the first of the keys that share the budget. ``currency`` null: the amount is in tokens.
    """

    tenant_id: str
    tenant: str
    key: int | None
    project: str | None
    period: Period
    percent: int
    amount: str
    currency: str | None
    at: datetime


@router.get("/alerts")
async def list_all_alerts(
    caller: Caller, admin: Admin, tenant_id: QueryText = None, after: AfterAlert = None, limit: Limit = 50
) -> Listed[AlertBody]:
    """List alerts of budgets, the newest first: of every tenant, or of one. Raises ``InvalidRequest``."""
    del caller
    place = None if after is None else AlertPlace.parse(after)
    async with admin.runtime.database.survey() as session:
        found = await list_alerts(session, tenant_id=tenant_id, after=place, most=limit + 1)
    return listed([_body(one) for one in found], limit, [one.place.cursor for one in found])


def _body(found: TenantsAlert) -> AlertBody:
    alert = found.alert
    return AlertBody(
        tenant_id=found.tenant_id,
        tenant=found.tenant,
        key=alert.name.key,
        project=alert.name.project,
        period=alert.name.period,
        percent=alert.percent,
        amount=cost_text(alert.amount) or "",
        currency=alert.name.currency,
        at=alert.at,
    )
