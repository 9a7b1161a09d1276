"""Web sessions of the dashboard: a key's own, and all of the tenant's for an administrator of keys."""

from fastapi import APIRouter, Request, Response

from api.acting import record_act
from api.dashboard.events import Streams
from api.dashboard.forms import see
from api.dashboard.rendering import page
from api.dashboard.web_session import PageUser
from api.services import Services
from tenants.audit_actions import Action
from tenants.rights import KeyRights, Principal, Role
from tenants.web_sessions import end_session, list_sessions

router = APIRouter(tags=["web sessions"])


@router.get("/sessions")
async def web_sessions(caller: PageUser, services: Services, request: Request) -> Response:
    """List the web sessions that the caller may end."""
    async with services.runtime.database.read() as session:
        rows = await list_sessions(session, caller.tenant, _bound(caller))
    return page(request, "tenant/sessions.html", sessions=rows, own=request.state.web_session)


@router.post("/sessions/{number}/end")
async def end(caller: PageUser, services: Services, request: Request, number: int) -> Response:
    """End a web session. Raises ``NotFound``."""
    async with services.runtime.database.write() as transaction:
        await end_session(transaction, caller.tenant, number, key_id=_bound(caller))
        await record_act(transaction, services, caller, Action.LOGIN_END, str(number))
    streams: Streams = request.app.state.streams
    streams.end(number)
    return see("/ui/sessions")


def _bound(caller: Principal) -> int | None:
    """Return the key whose sessions the caller may see; None for all of the tenant's, of a key that no other exceeds."""
    return None if caller.rights.excess(KeyRights(Role.ADMIN)) is None else caller.key_id
