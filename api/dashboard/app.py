"""The dashboard as an application of its own, beside the API's: own pages of errors, own callers, same services."""

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from api.dashboard import policy_reports, static_files
from api.dashboard.bounded_reads import BoundedReads
from api.dashboard.error_pages import install_error_pages, tenant_answer
from api.dashboard.events import Streams
from api.dashboard.feeds import install_feeds
from api.dashboard.login_guard import LoginGuard
from api.dashboard.origin_guard import OriginGuard
from api.dashboard.rendering import install_rendering
from api.dashboard.security_headers import is_under
from api.dashboard.session_watch import SessionWatch
from api.dashboard.static_files import install_static_files
from api.dashboard.tenant import (
    adapters,
    audit,
    checkpoints,
    errors,
    keys,
    login,
    overview,
    playground,
    projects,
    queue,
    run,
    runs,
    samples,
    sessions,
    usage,
    webhooks,
)
from api.route_building import routes_of
from api.services import ApiServices

PREFIX = "/ui"
_ROUTERS: tuple[APIRouter, ...] = (
    static_files.router,
    policy_reports.router,
    # A page adds its router here.
    overview.router,
    # Before the run: its paths would match the list's.
    runs.router,
    run.router,
    login.router,
    sessions.router,
    errors.router,
    usage.router,
    keys.router,
    projects.router,
    webhooks.router,
    audit.router,
    playground.router,
    samples.router,
    adapters.router,
    checkpoints.router,
    queue.router,
)
ROUTES = routes_of(*((PREFIX, router) for router in _ROUTERS))
"""Routes of every dashboard of a process."""


def create_dashboard(services: ApiServices) -> FastAPI:
    """Return the tenants' dashboard over ``services``."""
    app = FastAPI(title="weft dashboard", redirect_slashes=False, openapi_url=None, routes=list(ROUTES))
    app.state.services = services
    app.state.login_guard = LoginGuard()
    app.state.report_guard = LoginGuard()
    app.state.streams = Streams()
    app.state.session_watch = SessionWatch(services.batched_reads.web_sessions, services.runtime.database)
    install_rendering(app, insecure=services.runtime.settings.insecure_ui)
    install_static_files(app)
    install_feeds(app, services)
    install_error_pages(app, tenant_answer)
    app.add_middleware(OriginGuard)
    app.add_middleware(BoundedReads)
    return app


class DashboardDoor:
    """ASGI middleware that hands requests under the dashboard's prefix to the dashboard, and all others on."""

    def __init__(self, app: ASGIApp, *, dashboard: ASGIApp) -> None:
        self._app = app
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the dashboard or the application."""
        is_page = scope["type"] == "http" and is_under(scope["path"], PREFIX)
        await (self._dashboard if is_page else self._app)(scope, receive, send)
