"""Forms of a tenant's page: share, class and limits, budgets, suspension.

Each form names the state of the tenant that its page showed. If somebody has changed the tenant since, nothing is done and the
page says so, with the state of now.
"""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from api.admin.bodies import PathId, check_version
from api.admin.budgets import NewBudget, change_budget
from api.admin.services import Admin, AdminServices
from api.admin.tenants import NewSuspension, TenantBody, TenantChange, change_tenant, resume, show_tenant, suspend
from api.dashboard.form_values import body_of, integer, number, trimmed
from api.dashboard.forms import see
from api.dashboard.operators.forms import FormFields, given_reason
from api.dashboard.operators.rendering import OPS
from api.dashboard.operators.session import PageOperator
from api.dashboard.operators.tenants import shown_tenant
from contracts.errors import InvalidRequest, WeftError
from tenants.budgets import Period
from tenants.limits import LIMIT_NAMES
from tenants.operator_keys import Operator

router = APIRouter()


@router.post("/tenants/{tenant_id}/settings")
async def set_tenant(
    operator: PageOperator, admin: Admin, request: Request, tenant_id: PathId, form: FormFields
) -> Response:
    """Give the tenant a share, a class and limits. A limit that is left empty goes back to the setting's value."""

    async def change() -> None:
        version = trimmed(form, "version")
        own = await _checked(operator, admin, tenant_id, version)
        wanted = {name: integer(form, f"limit_{name}") for name in LIMIT_NAMES if f"limit_{name}" in form}
        limits = {name: value for name, value in wanted.items() if value != own.limits.get(name)}
        body = body_of(
            TenantChange,
            share=number(form, "share"),
            service_class=trimmed(form, "service_class"),
            limits=limits or None,
        )
        await change_tenant(operator, admin, request, Response(), tenant_id, body, version)

    return await _changed(change, operator, admin, request, tenant_id)


@router.post("/tenants/{tenant_id}/budget")
async def set_budget(
    operator: PageOperator, admin: Admin, request: Request, tenant_id: PathId, form: FormFields
) -> Response:
    """Give the tenant, or one of its keys or projects, a budget; an empty amount takes it away."""

    async def change() -> None:
        period = form.get("period", "")
        if period not in [*Period]:
            raise InvalidRequest(f"period must be one of {', '.join(Period)}")
        await _checked(operator, admin, tenant_id, trimmed(form, "version"))
        currency = trimmed(form, "currency")
        amount = integer(form, "amount") if currency is None else trimmed(form, "amount")
        body = body_of(
            NewBudget, amount=amount, key=trimmed(form, "key"), project=trimmed(form, "project"), currency=currency
        )
        await change_budget(operator, admin, request, tenant_id, Period(period), body)

    return await _changed(change, operator, admin, request, tenant_id)


@router.post("/tenants/{tenant_id}/suspend")
async def suspend_tenant(
    operator: PageOperator, admin: Admin, request: Request, tenant_id: PathId, form: FormFields
) -> Response:
    """Suspend the tenant, or give its suspension another mode and reason."""

    async def change() -> None:
        body = body_of(NewSuspension, mode=form.get("mode", ""), reason=given_reason(form))
        await _checked(operator, admin, tenant_id, trimmed(form, "version"))
        await suspend(operator, admin, request, tenant_id, body)

    return await _changed(change, operator, admin, request, tenant_id)


@router.post("/tenants/{tenant_id}/resume")
async def resume_tenant(
    operator: PageOperator, admin: Admin, request: Request, tenant_id: PathId, form: FormFields
) -> Response:
    """Have the tenant's work go on."""

    async def change() -> None:
        await _checked(operator, admin, tenant_id, trimmed(form, "version"))
        await resume(operator, admin, request, tenant_id)

    return await _changed(change, operator, admin, request, tenant_id)


async def _changed(
    change: Callable[[], Awaitable[None]], operator: Operator, admin: AdminServices, request: Request, tenant_id: str
) -> Response:
    """Carry out the change and answer with the tenant's page; a refusal is told on it."""
    try:
        await change()
    except WeftError as refusal:
        return await shown_tenant(operator, admin, request, tenant_id, refusal)
    return see(f"{OPS}/tenants/{tenant_id}")


async def _checked(operator: Operator, admin: AdminServices, tenant_id: str, version: str | None) -> TenantBody:
    """Return the tenant. Raises ``EditConflict`` unless it is in the state that the form names."""
    tenant = await show_tenant(operator, admin, Response(), tenant_id)
    check_version(version, tenant)
    return tenant
