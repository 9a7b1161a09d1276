"""Web sessions of the dashboard: a key's own, and all of the tenant's for an administrator of keys."""

from fastapi import APIRouter, Request, Response

from api.acting import record_act, record_acts
from api.dashboard.events import Streams
from api.dashboard.forms import Form, see
from api.dashboard.rendering import page
from api.dashboard.web_session import PageUser
from api.route_bounds import bounded
from api.services import Services
from contracts.errors import Forbidden
from tenants.audit_actions import Action
from tenants.rights import KeyRights, Principal, Role
from tenants.web_sessions import end_other_sessions, end_session, list_sessions

router = APIRouter(tags=["web sessions"])


@router.get("/sessions")
async def web_sessions(caller: PageUser, services: Services, request: Request) -> Response:
    """List the web sessions that the caller may end."""
    async with services.runtime.database.survey() as session:
        rows = await list_sessions(session, caller.tenant, _bound(caller))
    own = request.state.web_session
    others = [one.key_id for one in rows if one.id != own]
    return page(request, "tenant/sessions.html", sessions=rows, own=own, others=others)


@router.post("/sessions/others/end")
@bounded(goes_on=True)
async def end_others(caller: PageUser, services: Services, request: Request, form: Form) -> Response:
    """End all web sessions but this one: the key's own, or the tenant's if ``whose`` is ``tenant``.

    Raises ``Forbidden`` for the tenant's, unless the caller may end each of them.
    """
    key_id: int | None = caller.key_id
    if form.get("whose") == "tenant" and (key_id := _bound(caller)) is not None:
        raise Forbidden("other keys' sessions are ended by a key that may do all that they may")
    async with services.runtime.database.write() as transaction:
        ended = await end_other_sessions(transaction, caller.tenant, request.state.web_session, key_id=key_id)
        await record_acts(transaction, services, caller, Action.LOGIN_END, [(str(number), None) for number in ended])
    streams: Streams = request.app.state.streams
    for number in ended:
        streams.end(number)
    return see("/ui/sessions")


@router.post("/sessions/{number}/end")
@bounded(goes_on=True)
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
