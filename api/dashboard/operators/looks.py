"""A look at a tenant's pages as its viewer: read only, for a quarter of an hour, and in the tenant's own audit log."""

from fastapi import APIRouter, Request, Response

from api.admin.acts import record_operator
from api.admin.bodies import PathId, ReasonBody
from api.admin.services import Admin, AdminServices
from api.admin.tenants import find_row
from api.dashboard.cookies import is_secure
from api.dashboard.form_values import body_of
from api.dashboard.operators.forms import FormFields
from api.dashboard.operators.rendering import operator_page
from api.dashboard.operators.session import PageOperator
from api.dashboard.operators.tenants import shown_tenant
from contracts.errors import InvalidRequest, WeftError
from contracts.ids import TenantId
from tenants.audit_actions import Action
from tenants.key_holds import hold_operator
from tenants.looks import LOOK, begin_look

router = APIRouter()


@router.post("/tenants/{tenant_id}/look")
async def look(operator: PageOperator, admin: Admin, request: Request, tenant_id: PathId, form: FormFields) -> Response:
    """Begin a look, and show the code that opens it on the tenants' port."""
    runtime = admin.runtime
    try:
        reason = body_of(ReasonBody, reason=form.get("reason", "")).reason
        if not reason:
            raise InvalidRequest("say why you look: the tenant reads it in its audit log")
        async with runtime.database.write() as transaction:
            await hold_operator(transaction, operator, runtime.clock())
            tenant = await find_row(transaction, tenant_id)
            code = await begin_look(
                transaction, TenantId(tenant.id), operator=operator.name, reason=reason, clock=runtime.clock
            )
            told = {"reason": reason, "minutes": int(LOOK.total_seconds() // 60)}
            await record_operator(
                transaction, admin, request, operator, Action.TENANT_LOOK, tenant.id, tenant=tenant.id, after=told
            )
            name = tenant.name
    except WeftError as refusal:
        return await shown_tenant(operator, admin, request, tenant_id, refusal)
    url = _address(admin, request)
    return operator_page(
        request,
        operator,
        "operators/look.html",
        tenant_id=tenant_id,
        name=name,
        code=code,
        # In the fragment, which no log sees.
        url=None if url is None else f"{url}/ui/login#code={code}",
        reason=reason,
    )


def _address(admin: AdminServices, request: Request) -> str | None:
    """Return the tenants' pages' address, None where only the operator knows one that nobody can listen to."""
    settings = admin.runtime.settings
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    # The tenants' port of this machine.
    return (
        f"http://{request.url.hostname}:{settings.port}"
        if request.url.scheme == "http" and is_secure(request)
        else None
    )
