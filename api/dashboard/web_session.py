"""Callers of pages: dependencies that turn the cookie of a web session into the principal whose key began it.

The principal is the API's own, with the rights that the key has now, and it counts among its tenant's requests in progress.
"""

from functools import partial
from typing import Annotated

from fastapi import Depends, Request

from api.dashboard.cookies import check_secure, session_cookie
from api.dashboard.unattended import is_unattended
from api.request_rates import count_request
from api.security_events import note_refusal, source_of
from api.services import ApiServices, Services
from api.suspended_requests import check_standing, check_standing_again
from api.wire.late_body import check_after_body
from contracts.errors import Forbidden, Unauthenticated
from store.fair_places import ask_for
from telemetry.context import note_caller
from tenants.rights import Principal, Scope
from tenants.web_sessions import note_seen

_READS = frozenset({"GET", "HEAD"})
_LOGOUT = "/ui/logout"


async def get_page_caller(request: Request, services: Services) -> Principal:
    """Return the principal of the request's web session; ``request.state`` then has its number and its tenant's name.

    Raises ``Unauthenticated``, upon which the browser is sent to the login, and ``Forbidden``, ``Suspended``,
    ``TooManyRequests`` as for the key itself; a logout is no operator's change and open to a blocked tenant.
    """
    runtime = services.runtime
    check_secure(request, may_be_insecure=runtime.settings.insecure_ui)
    secret, loop_time = session_cookie(request), services.admission.loop_time
    try:
        found = await services.batched_reads.web_sessions.find(
            secret, source_of(request), is_use=not is_unattended(request)
        )
    except Unauthenticated:
        loop_time.forget(secret)
        raise
    principal = found.principal
    loop_time.know(secret, principal.tenant)
    request.state.looker = found.operator
    request.state.tenant_name = found.tenant_name
    note_caller(principal.tenant, principal.key_id)
    try:
        _check_look(request, found.operator)
        principal.check_address()
    except Forbidden as refusal:
        note_refusal(request, refusal, principal)
        raise
    # For the page of the error, which has the logout, and for the count of refusals.
    request.state.principal = principal
    if not _is_logout(request):
        check_standing(request, principal)
    request.state.web_session = found.id
    check_after_body(request, partial(_check_again, services, principal))
    ask_for(principal.tenant)
    await services.admission.enter(principal.tenant, request.scope)
    if found.is_due:
        async with runtime.database.write() as transaction:
            await note_seen(transaction, found.id, runtime.clock())
    return principal


async def _check_again(services: ApiServices, before: Principal, request: Request) -> None:
    """Raise what refuses a caller whose session, key or tenant has ended or been suspended while its form came."""
    again = await services.batched_reads.web_sessions.principal(session_cookie(request), source_of(request))
    check_standing_again(request, before, again)


def _check_look(request: Request, operator: str | None) -> None:
    """Raise ``Forbidden`` for a change by an operator who only looks at the tenant's pages."""
    if operator is not None and request.method not in _READS and not _is_logout(request):
        raise Forbidden("you look at this tenant's pages as an operator: nothing can be changed from here")


def _is_logout(request: Request) -> bool:
    return request.url.path == _LOGOUT


PageCaller = Annotated[Principal, Depends(get_page_caller)]


async def count_data(request: Request, services: Services, principal: PageCaller) -> None:
    """Count the request to the rates of requests, unless an operator sends it. Raises ``OverRate``."""
    if request.state.looker is None:
        await count_request(request, services, principal)


COUNTED = Depends(count_data)
"""Put it into the ``dependencies`` of a route that is no look at a page: of a sample, an export or a link to a download."""


class PageRequire:
    """Dependency of a page that needs one of some scopes; with none named, any session is enough."""

    def __init__(self, *any_of: Scope) -> None:
        self.any_of = any_of

    async def __call__(self, principal: PageCaller) -> Principal:
        """Return the principal. Raises ``Forbidden`` without any of the scopes."""
        principal.check(*self.any_of)
        return principal


PageUser = Annotated[Principal, Depends(PageRequire())]
"""Caller with any session."""
PageReader = Annotated[Principal, Depends(PageRequire(Scope.READ))]
PageSampleReader = Annotated[Principal, Depends(PageRequire(Scope.READ, Scope.SAMPLE))]
PageSampleCaller = Annotated[Principal, Depends(PageRequire(Scope.SAMPLE))]
PageCheckpointWriter = Annotated[Principal, Depends(PageRequire(Scope.CHECKPOINTS_WRITE))]
PageDownloader = Annotated[Principal, Depends(PageRequire(Scope.CHECKPOINTS_DOWNLOAD))]
PageGateReader = Annotated[Principal, Depends(PageRequire(Scope.READ, Scope.GATES))]
PageGateKeeper = Annotated[Principal, Depends(PageRequire(Scope.GATES))]
PageUsageReader = Annotated[Principal, Depends(PageRequire(Scope.READ, Scope.USAGE))]
PageBillingReader = Annotated[Principal, Depends(PageRequire(Scope.USAGE))]
PageProjectReader = Annotated[Principal, Depends(PageRequire(Scope.READ, Scope.PROJECTS))]
PageProjectAdmin = Annotated[Principal, Depends(PageRequire(Scope.PROJECTS))]
PageKeyAdmin = Annotated[Principal, Depends(PageRequire(Scope.KEYS))]
PageAuditReader = Annotated[Principal, Depends(PageRequire(Scope.AUDIT))]
PageWebhookAdmin = Annotated[Principal, Depends(PageRequire(Scope.WEBHOOKS))]
