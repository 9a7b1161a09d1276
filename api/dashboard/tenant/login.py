"""Login and logout. A key, or a one-time code, is taken once and becomes a web session."""

import re
from contextlib import suppress
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from api.acting import record_act
from api.dashboard.cookies import check_secure, drop_session_cookie, is_secure, session_cookie, set_session_cookie
from api.dashboard.events import Streams
from api.dashboard.forms import Form, see
from api.dashboard.login_guard import MOST_BEGUN, LoginGuard, address_name, names_of
from api.dashboard.rendering import page
from api.dashboard.web_session import PageUser
from api.security_events import note_refusal, note_refused_key, source_of
from api.services import ApiServices, Services
from contracts.errors import Forbidden, NotFound, OverRate, Unauthenticated, WeftError
from store.fair_places import ask_for
from telemetry.context import note_caller
from tenants.audit_actions import Action
from tenants.key_text import KEY_PREFIX
from tenants.login_codes import redeem_code
from tenants.rights import Principal, Via
from tenants.web_sessions import begin_session, end_session

router = APIRouter(tags=["login"])

_WRONG_KEY = "That is no live API key of this service. Check that it was copied whole, or ask your administrator."
_WRONG_CODE = "This one-time code was used before, or its time is over. `weft ui open` makes another."
_MOST_NEXT = 2000
"""Characters of an address of an own page that a login goes on to."""
_OWN_PAGE = re.compile(r"/ui(/[A-Za-z0-9._~:@!$&'()*+,;=%/-]*)?(\?[A-Za-z0-9._~:@!$&'()*+,;=%/?-]*)?")


@router.get("/login")
async def login_page(request: Request, services: Services, next: str = "") -> Response:
    """Show the form that takes a key. Of a page to go on to whose address is too long, the query is left out."""
    return _form(request, services, next if len(next) <= _MOST_NEXT else next.partition("?")[0][:_MOST_NEXT])


@router.post("/login")
async def log_in(request: Request, services: Services, form: Form) -> Response:
    """Begin a web session with the key of the form. A wrong one is answered alike, whatever is wrong with it."""
    check_secure(request, may_be_insecure=services.runtime.settings.insecure_ui)
    key, target = form.get("key", "").strip(), form.get("next", "")
    guard: LoginGuard = request.app.state.login_guard
    now, address = services.runtime.clock(), address_name(request.scope)
    try:
        guard.check(address, now=now)
        principal = await _holder(request, services, guard, key)
        return await _begun(request, services, principal, target)
    except Unauthenticated:
        return _form(request, services, target, status=401, problem=_WRONG_KEY)
    except OverRate as error:
        return _form(request, services, target, status=429, problem=error.message, retry_after=error.retry_after)
    except WeftError as error:
        return _form(request, services, target, status=error.status, problem=error.message)


@router.post("/login/code")
async def log_in_by_code(request: Request, services: Services, form: Form) -> Response:
    """Begin a web session with a one-time code, which is used up."""
    check_secure(request, may_be_insecure=services.runtime.settings.insecure_ui)
    guard: LoginGuard = request.app.state.login_guard
    now, address = services.runtime.clock(), address_name(request.scope)
    try:
        guard.check(address, now=now)
        async with services.runtime.database.write() as transaction:
            prefix = await redeem_code(transaction, form.get("code", "")[:100], now)
        principal = await services.batched_reads.keys.principal(prefix, source_of(request))
        return await _begun(request, services, principal, "")
    except Unauthenticated:
        guard.note(address, now=now)
        note_refused_key(request, None)
        return _form(request, services, "", status=401, problem=_WRONG_CODE)
    except WeftError as error:
        return _form(request, services, "", status=error.status, problem=error.message)


@router.post("/logout")
async def log_out(caller: PageUser, services: Services, request: Request) -> Response:
    """End the web session, and have the browser forget what it keeps of it."""
    await _end(request, services, caller, request.state.web_session)
    answer = see("/ui/login")
    drop_session_cookie(request, answer)
    answer.headers["Clear-Site-Data"] = '"cache", "storage"'
    return answer


async def _end(request: Request, services: ApiServices, principal: Principal, number: int) -> None:
    """End the request's web session and its streams, and forget its secret. Raises ``NotFound``."""
    async with services.runtime.database.write() as transaction:
        await end_session(transaction, principal.tenant, number, key_id=principal.key_id)
        await record_act(transaction, services, principal, Action.LOGIN_END, str(number))
    streams: Streams = request.app.state.streams
    streams.end(number)
    services.admission.loop_time.forget(session_cookie(request))


async def _end_former(request: Request, services: ApiServices) -> None:
    """End the session that the browser has already, if it has one: its cookie is about to be overwritten."""
    with suppress(Unauthenticated, NotFound):
        former = await services.batched_reads.web_sessions.find(session_cookie(request), source_of(request))
        await _end(request, services, former.principal, former.id)


async def _holder(request: Request, services: ApiServices, guard: LoginGuard, key: str) -> Principal:
    """Return the principal of a right key. Raises ``Unauthenticated`` for a wrong one, ``OverRate`` for too many of them."""
    try:
        if not key.startswith(KEY_PREFIX):
            raise Unauthenticated("no key")
        return await services.batched_reads.keys.authenticate(key, source_of(request))
    except Unauthenticated:
        names, now = names_of(request.scope, key), services.runtime.clock()
        note_refused_key(request, key)
        guard.check(*names, now=now)
        guard.note(*names, now=now)
        raise


async def _begun(request: Request, services: ApiServices, principal: Principal, target: str) -> Response:
    """Begin a session for the principal, at most ``MOST_BEGUN`` a minute and key, and end the one that the browser has.

    Raises ``Forbidden`` for an address that the key is not for, ``Suspended``, ``OverRate``, ``TooManyRequests``.
    """
    guard: LoginGuard = request.app.state.login_guard
    begun = f"begun {principal.key_id}"
    guard.check(begun, now=services.runtime.clock(), most=MOST_BEGUN)
    principal = replace(principal, via=Via.UI)
    try:
        principal.check_address()
        principal.check_not_blocked()
    except Forbidden as refusal:
        note_refusal(request, refusal, principal)
        raise
    note_caller(principal.tenant, principal.key_id)
    ask_for(principal.tenant)
    await services.admission.enter(principal.tenant, request.scope)
    guard.note(begun, now=services.runtime.clock())
    runtime, agent = services.runtime, request.headers.get("user-agent", "")
    lifetime = runtime.settings.web_session_lifetime
    await _end_former(request, services)
    async with runtime.database.write() as transaction:
        token = await begin_session(transaction, principal, now=runtime.clock(), lifetime=lifetime, agent=agent)
        await record_act(transaction, services, principal, Action.LOGIN_BEGIN, principal.prefix, after={"agent": agent})
    services.admission.loop_time.know(token, principal.tenant)
    answer = see(target if _OWN_PAGE.fullmatch(target) else "/ui")
    set_session_cookie(request, answer, token, seconds=int(lifetime.total_seconds()))
    return answer


def _form(
    request: Request,
    services: ApiServices,
    target: str,
    *,
    status: int = 200,
    problem: str = "",
    retry_after: int | None = None,
) -> Response:
    may = is_secure(request) or services.runtime.settings.insecure_ui
    answer = page(request, "login.html", status=status, problem=problem, next=target, may_log_in=may)
    if retry_after is not None:
        answer.headers["Retry-After"] = str(retry_after)
    return answer
