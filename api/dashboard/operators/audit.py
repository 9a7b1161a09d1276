"""Page of the audit log: every tenant's entries and the service's own."""

from fastapi import APIRouter, Request, Response

from api.admin.audit import list_entries
from api.admin.bodies import QueryText
from api.admin.services import Admin
from api.dashboard.operators.names import names_of, tenant_id_of
from api.dashboard.operators.rendering import operator_page
from api.dashboard.operators.session import PageOperator
from contracts.errors import InvalidRequest
from tenants.audit_actions import Action

router = APIRouter()

_A_PAGE = 50


@router.get("/audit")
async def audit_page(
    operator: PageOperator,
    admin: Admin,
    request: Request,
    tenant: QueryText = None,
    action: QueryText = None,
    after: QueryText = None,
) -> Response:
    """List entries, the newest first. The look makes an entry itself."""
    if action and action not in [*Action]:
        raise InvalidRequest("no such action")
    found = await list_entries(
        operator,
        admin,
        request,
        tenant=await tenant_id_of(admin, tenant),
        action=[Action(action)] if action else None,
        limit=_A_PAGE,
        after=after,
    )
    asked = {"tenant": tenant or "", "action": action or ""}
    return operator_page(
        request,
        operator,
        "operators/audit.html",
        log=found.items,
        next=found.next,
        asked=asked,
        actions=list(Action),
        names=await names_of(admin, (one.tenant_id for one in found.items)),
    )
