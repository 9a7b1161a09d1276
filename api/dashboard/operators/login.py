"""Login of operators: their key once, for a session of a browser; and its end."""

from contextlib import suppress

from fastapi import APIRouter, Request, Response

from api.admin.acts import record_operator
from api.admin.services import Admin, AdminServices
from api.dashboard.cookies import check_secure, is_secure
from api.dashboard.forms import see
from api.dashboard.login_guard import LoginGuard, address_name
from api.dashboard.operators.forms import FormFields
from api.dashboard.operators.rendering import OPS, operator_page
from api.dashboard.operators.session import OperatorBrowser, drop_cookie, find_session, key_of, set_cookie
from api.security_events import note_refused_key, source_of
from contracts.errors import NotFound, OverRate, Unauthenticated, WeftError
from tenants.audit_actions import Action
from tenants.operator_keys import Operator, authenticate_operator
from tenants.operator_sessions import (
    begin_operator_session,
    end_operator_session,
    list_operator_sessions,
    redeem_operator_code,
)

router = APIRouter()


@router.get("/login")
async def login_page(request: Request) -> Response:
    """Show the form that takes an operator's key."""
    return _page(request, None)


@router.post("/login")
async def log_in(admin: Admin, request: Request, form: FormFields) -> Response:
    """Begin a session with an operator's key. A wrong one is answered alike, whatever is wrong with it."""
    check_secure(request, may_be_insecure=False)
    key, now = form.get("key", "").strip(), admin.runtime.clock()
    address, guard = address_name(request.scope), _guard(request)
    try:
        guard.check(address, now=now)
        operator = await authenticate_operator(admin.runtime.database, key, admin.runtime.clock)
    except OverRate as refusal:
        return _page(request, refusal)
    except Unauthenticated as refusal:
        guard.note(address, now=now)
        note_refused_key(request, key)
        return _page(request, refusal)
    return await _begun(admin, request, operator)


@router.post("/login/code")
async def log_in_by_code(admin: Admin, request: Request, form: FormFields) -> Response:
    """Begin a session with a one-time code, which is used up."""
    check_secure(request, may_be_insecure=False)
    now, address, guard = admin.runtime.clock(), address_name(request.scope), _guard(request)
    try:
        guard.check(address, now=now)
        async with admin.runtime.database.write() as transaction:
            operator = await redeem_operator_code(transaction, form.get("code", "")[:100], now)
    except OverRate as refusal:
        return _page(request, refusal)
    except Unauthenticated as refusal:
        guard.note(address, now=now)
        note_refused_key(request, None)
        return _page(request, refusal)
    return await _begun(admin, request, operator)


@router.post("/logout")
async def log_out(browser: OperatorBrowser, admin: Admin, request: Request) -> Response:
    """End the browser's session, and have it forget what it keeps of it."""
    await _end(admin, request, browser.operator, browser.id)
    answer = see(f"{OPS}/login")
    drop_cookie(answer)
    answer.headers["Clear-Site-Data"] = '"cache", "storage"'
    return answer


@router.get("/browsers")
async def browsers_page(browser: OperatorBrowser, admin: Admin, request: Request) -> Response:
    """List the browsers that are logged in with the operator's key."""
    async with admin.runtime.database.read() as session:
        rows = await list_operator_sessions(session, key_of(browser.operator), admin.runtime.clock())
    return operator_page(request, browser.operator, "operators/browsers.html", sessions=rows, own=browser.id)


@router.post("/browsers/{number}/end")
async def end_browser(browser: OperatorBrowser, admin: Admin, request: Request, number: int) -> Response:
    """End a session of the operator's key. Raises ``NotFound``."""
    await _end(admin, request, browser.operator, number)
    return see(f"{OPS}/browsers")


async def _end(admin: AdminServices, request: Request, operator: Operator, number: int) -> None:
    """End a session of the operator's key. Raises ``NotFound``."""
    async with admin.runtime.database.write() as transaction:
        await end_operator_session(transaction, number, key_id=key_of(operator))
        await record_operator(
            transaction,
            admin,
            request,
            operator,
            Action.LOGIN_END,
            operator.name,
            tenant=None,
            after={"session": number},
        )


async def _begun(admin: AdminServices, request: Request, operator: Operator) -> Response:
    by_page = Operator(operator.name, operator.key_id, is_browser=True)
    agent = request.headers.get("user-agent", "")
    if former := await find_session(request, admin):
        # The browser is about to lose its cookie. A logout beside this login has ended the session already.
        with suppress(NotFound):
            await _end(admin, request, former.operator, former.id)
    async with admin.runtime.database.write() as transaction:
        secret = await begin_operator_session(
            transaction, by_page, address=source_of(request), agent=agent, now=admin.runtime.clock()
        )
        told = {"agent": agent}
        await record_operator(
            transaction, admin, request, by_page, Action.LOGIN_BEGIN, operator.name, tenant=None, after=told
        )
    answer = see(f"{OPS}/overview")
    set_cookie(answer, secret)
    return answer


def _guard(request: Request) -> LoginGuard:
    guard: LoginGuard = request.app.state.login_guard
    return guard


def _page(request: Request, refusal: WeftError | None) -> Response:
    return operator_page(request, None, "operators/login.html", refusal=refusal, may_log_in=is_secure(request))
