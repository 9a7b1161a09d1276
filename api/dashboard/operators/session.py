"""Callers of operators' pages: the cookie of an operator's browser, and the operator whose key it has logged in with.

The cookie has a name of its own, and its session a table of its own: a tenant's opens nothing here, nor an operator's there.
"""

from functools import partial
from typing import Annotated

from fastapi import Depends, Request, Response

from api.admin.services import Admin, AdminServices
from api.dashboard.cookies import check_secure
from api.dashboard.unattended import is_unattended
from api.presented_session import OPERATOR_COOKIE, presented_session
from api.wire.late_body import check_after_body
from contracts.errors import Unauthenticated
from tenants.operator_keys import Operator
from tenants.operator_sessions import WHOLE, LiveOperatorSession, live_operator_session, note_operator_seen

_LONGEST_SECRET = 200


def set_cookie(response: Response, secret: str) -> None:
    """Have the browser keep its session's secret."""
    seconds = int(WHOLE.total_seconds())
    response.set_cookie(OPERATOR_COOKIE, secret, max_age=seconds, path="/", secure=True, httponly=True, samesite="lax")


def drop_cookie(response: Response) -> None:
    """Have the browser forget the secret."""
    response.delete_cookie(OPERATOR_COOKIE, path="/", secure=True, httponly=True, samesite="lax")


async def get_operator_session(request: Request, admin: Admin) -> LiveOperatorSession:
    """Return the session of the request's browser. Raises ``Unauthenticated``, upon which it is sent to the login."""
    check_secure(request, may_be_insecure=False)
    found, now = await _live_session(request, admin), admin.runtime.clock()
    admin.admit(presented_session(request.headers, OPERATOR_COOKIE))
    check_after_body(request, partial(_check_again, admin))
    if found.is_due(now) and not is_unattended(request):
        async with admin.runtime.database.write() as transaction:
            await note_operator_seen(transaction, found.id, now)
    return found


async def _live_session(request: Request, admin: AdminServices) -> LiveOperatorSession:
    found = await find_session(request, admin)
    if found is None:
        admin.refuse(presented_session(request.headers, OPERATOR_COOKIE))
        raise Unauthenticated("this session has ended; log in again")
    return found


async def _check_again(admin: AdminServices, request: Request) -> None:
    """Raise ``Unauthenticated`` for a browser whose session or key has ended while the form came."""
    await _live_session(request, admin)


async def find_session(request: Request, admin: AdminServices) -> LiveOperatorSession | None:
    """Return the session of the request's cookie, None without one that goes on."""
    secret = request.cookies.get(OPERATOR_COOKIE, "")
    if not 0 < len(secret) <= _LONGEST_SECRET:
        return None
    async with admin.runtime.database.read() as session:
        return await live_operator_session(session, secret, now=admin.runtime.clock())


def key_of(operator: Operator) -> int:
    """Return the key of a browser's operator, which a command alone has not."""
    assert operator.key_id is not None
    return operator.key_id


OperatorBrowser = Annotated[LiveOperatorSession, Depends(get_operator_session)]


async def get_page_operator(browser: OperatorBrowser) -> Operator:
    """Return the operator of the request's browser."""
    return browser.operator


PageOperator = Annotated[Operator, Depends(get_page_operator)]
"""Parameter type of every page. Declare it before the form: a body without a session stays unread."""
