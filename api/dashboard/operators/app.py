"""Operators' pages as an application of its own, beside the admin API on its listener: same services, other door."""

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from api.admin.services import AdminServices
from api.admission import AdmissionEnd
from api.dashboard import policy_reports, static_files
from api.dashboard.bounded_reads import BoundedReads
from api.dashboard.error_pages import install_error_pages
from api.dashboard.login_guard import LoginGuard
from api.dashboard.operators import (
    audit,
    housekeeping,
    lists,
    login,
    looks,
    overview,
    processes,
    queue,
    replicas,
    tenant_changes,
    tenants,
)
from api.dashboard.operators.error_pages import operator_answer
from api.dashboard.operators.rendering import OPS
from api.dashboard.origin_guard import OriginGuard
from api.dashboard.rendering import install_rendering
from api.dashboard.security_headers import SecurityHeaders, is_under
from api.dashboard.static_files import install_static_files
from api.loop_turns import LoopTurns
from api.request_observer import RequestObserver
from api.route_building import routes_of

_UI = "/ui"
STATIC = f"{_UI}/static"
"""Path of styles and scripts, the same on both listeners."""
_ROUTERS: tuple[APIRouter, ...] = (
    overview.router,
    login.router,
    tenants.router,
    tenant_changes.router,
    looks.router,
    queue.router,
    replicas.router,
    processes.router,
    lists.router,
    audit.router,
    housekeeping.router,
)
home = APIRouter()


@home.get("")
async def front_page() -> RedirectResponse:
    """Send the browser to the overview."""
    return RedirectResponse(f"{OPS}/overview", status_code=303)


ROUTES = routes_of((_UI, static_files.router), *((OPS, router) for router in (home, policy_reports.router, *_ROUTERS)))
"""Routes of every application of operators' pages in a process."""


def create_operator_pages(services: AdminServices) -> FastAPI:
    """Return the operators' pages over ``services``."""
    app = FastAPI(title="weft operators", redirect_slashes=False, openapi_url=None, routes=list(ROUTES))
    app.state.services = services
    app.state.login_guard = LoginGuard()
    app.state.report_guard = LoginGuard()
    install_rendering(app)
    install_static_files(app)
    install_error_pages(app, operator_answer)
    app.add_middleware(OriginGuard)
    app.add_middleware(BoundedReads)
    # Added last, so outermost: the audit log's entries have the request's trace id.
    app.add_middleware(RequestObserver, telemetry=services.runtime.telemetry, prefixes=(OPS, _UI))
    return app


def with_operator_pages(admin_app: ASGIApp, pages: ASGIApp, services: AdminServices) -> ASGIApp:
    """Return the listener's application: the pages under their prefix, the admin API elsewhere.

    Whoever asks is a stranger until a key or a session is known, and takes turns with others on the loop and the database.
    """
    # uvicorn and starlette write the same types in other words.
    door: Any = LoopTurns(AdmissionEnd(_OperatorDoor(admin_app, pages)), loop_time=services.loop_time)
    proxies = [str(network) for network in services.runtime.settings.trusted_proxies]
    proxied: Any = ProxyHeadersMiddleware(door, trusted_hosts=proxies)
    return SecurityHeaders(proxied, pages=(OPS, STATIC))


class _OperatorDoor:
    """ASGI application that hands requests under the pages' prefixes to the pages, and all others on."""

    def __init__(self, app: ASGIApp, pages: ASGIApp) -> None:
        self._app = app
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the pages or the application."""
        is_page = scope["type"] == "http" and (is_under(scope["path"], OPS) or is_under(scope["path"], STATIC))
        await (self._pages if is_page else self._app)(scope, receive, send)
