"""The audit log of a tenant: who did what, newest first."""

from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from api.dashboard.rendering import page
from api.dashboard.web_session import PageAuditReader
from api.security_events import note_read
from api.services import Services
from api.weft.audit import audit_page
from api.wire.request_model import NO_NUL
from tenants.audit_actions import MEANINGS, Action
from tenants.audit_log import AuditFilter

router = APIRouter(tags=["audit"])

_ENTRIES = 50
KeyPrefix = Annotated[str, Query(pattern=r"^(tml-[0-9a-f]{12})?$")]
"""First part of a key. A whole one is a secret, which no address may have."""
Text = Annotated[str, Query(max_length=100, pattern=NO_NUL)]


@router.get("/audit")
async def audit(
    caller: PageAuditReader,
    services: Services,
    request: Request,
    action: Annotated[Action | Literal[""], Query()] = "",
    key: KeyPrefix = "",
    cursor: Text = "",
) -> Response:
    """Show a page of the log."""
    note_read(request, caller, Action.AUDIT_READ)
    which = AuditFilter(owner=caller.reach, actions=[action] if action else None, key=key or None)
    found = await audit_page(services, which, most=_ENTRIES, cursor=cursor or None)
    filters = {name: value for name, value in (("action", action), ("key", key)) if value}
    first = "/ui/audit?" + urlencode(filters) if cursor else None
    older = None if found.next_cursor is None else "/ui/audit?" + urlencode({**filters, "cursor": found.next_cursor})
    return page(
        request,
        "tenant/audit.html",
        entries=found.entries,
        first=first,
        older=older,
        action=action,
        key=key,
        actions=list(Action),
        meanings=MEANINGS,
    )
