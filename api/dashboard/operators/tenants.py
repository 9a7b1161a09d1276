"""Pages of tenants: what each was served against its share, and one tenant with its limits, budgets, runs and sessions."""

from typing import Any

from fastapi import APIRouter, Request, Response

from api.admin.alerts import list_all_alerts
from api.admin.bodies import PathId, version_of
from api.admin.runs import list_runs
from api.admin.services import Admin, AdminServices
from api.admin.sessions import list_sessions
from api.admin.shares import TenantShares, list_shares
from api.admin.tenants import show_standing, show_tenant
from api.dashboard.operators.rendering import operator_page
from api.dashboard.operators.session import PageOperator
from api.dashboard.unattended import UNATTENDED
from contracts.errors import WeftError
from contracts.ids import TenantId
from contracts.service_class import ServiceClass
from tenants.budgets import Period
from tenants.operator_keys import Operator
from tenants.prices import currency_of
from tenants.rights import SuspendMode
from tenants.usage_costs import KnownCost, costs_of_tenants

router = APIRouter()

_A_PAGE = 100
_ALERTS = 20
_SHOWN = 10
"""Runs and sessions that a tenant's page shows; other pages have them all."""


@router.get("/tenants")
async def tenants_page(operator: PageOperator, admin: Admin, request: Request, after: str | None = None) -> Response:
    """List tenants, the busiest of the page first, and the latest alerts of all."""
    listed = await _listed(operator, admin, after)
    alerts = (await list_all_alerts(operator, admin, limit=_ALERTS)).items
    return operator_page(request, operator, "operators/tenants.html", after=after, alerts=alerts, **listed)


@router.get("/tenants/now", dependencies=[UNATTENDED])
async def tenants_fragment(
    operator: PageOperator, admin: Admin, request: Request, after: str | None = None
) -> Response:
    """Return the table of tenants, which changes."""
    return operator_page(request, operator, "operators/tenants_now.html", **await _listed(operator, admin, after))


async def _listed(operator: Operator, admin: AdminServices, after: str | None) -> dict[str, Any]:
    """Return a page of tenants, and what those have spent today (UTC) where there are prices."""
    found = await list_shares(operator, admin, after, _A_PAGE)
    costs: dict[TenantId, KnownCost] = {}
    async with admin.runtime.database.survey() as session:
        currency = await currency_of(session)
        if currency is not None:
            now, ids = await admin.now(), [TenantId(one.id) for one in found.items]
            today = now.replace(hour=0, minute=0, second=0, microsecond=0)
            costs = await costs_of_tenants(session, ids, since=today, before=now)
    tenants = sorted(found.items, key=_by_load)
    return {"tenants": tenants, "next": found.next, "costs": costs, "currency": currency}


@router.get("/tenants/{tenant_id}")
async def tenant_page(operator: PageOperator, admin: Admin, request: Request, tenant_id: PathId) -> Response:
    """Show one tenant, with forms to change it."""
    return await shown_tenant(operator, admin, request, tenant_id, None)


async def shown_tenant(
    operator: Operator, admin: AdminServices, request: Request, tenant_id: str, refusal: WeftError | None
) -> Response:
    """Return a tenant's page. ``refusal``: why the form before it was not carried out."""
    tenant = await show_tenant(operator, admin, Response(), tenant_id)
    return operator_page(
        request,
        operator,
        "operators/tenant.html",
        refusal=refusal,
        tenant=tenant,
        version=version_of(tenant),
        standing=await show_standing(operator, admin, tenant_id),
        runs=(await list_runs(operator, admin, tenant_id=tenant_id, limit=_SHOWN)).items,
        sessions=(await list_sessions(operator, admin, tenant_id=tenant_id, is_open=True, limit=_SHOWN)).items,
        classes=list(ServiceClass),
        modes=list(SuspendMode),
        periods=list(Period),
    )


def _by_load(one: TenantShares) -> tuple[float, float, str]:
    return (-max(window.tokens for window in one.served), -one.pending, one.name)
