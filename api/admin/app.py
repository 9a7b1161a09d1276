"""The admin API as an ASGI application: served on a listener of its own, or called by a command on the database."""

from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request

from api.admin import (
    ADMIN_PREFIX,
    alerts,
    audit,
    bases,
    budgets,
    checkpoints,
    deletions,
    gates,
    housekeeping,
    keys,
    operations,
    overview,
    prices,
    processes,
    projects,
    queue,
    replicas,
    runs,
    sessions,
    shares,
    tenants,
    usage,
    webhooks,
)
from api.admin.services import Admin, AdminServices, Authenticate, Caller
from api.errors import install_error_handlers
from api.openapi_document import DescribedApi
from api.presented_key import presented_key
from api.request_observer import RequestObserver
from api.route_building import routes_of
from api.security_events import note_refused_key
from contracts.errors import Unauthenticated
from store.clock import Clock
from store.database import Database
from tenants.operator_keys import Operator, authenticate_operator

_MODULES = (
    tenants,
    audit,
    prices,
    budgets,
    alerts,
    deletions,
    keys,
    projects,
    usage,
    runs,
    sessions,
    operations,
    gates,
    replicas,
    processes,
    queue,
    housekeeping,
    overview,
    shares,
    checkpoints,
    bases,
    webhooks,
)
_document = APIRouter()


def by_key(database: Database, clock: Clock) -> Authenticate:
    """Return the authentication by an operator's key, in ``X-API-Key`` or ``Authorization: Bearer``."""

    async def authenticate(request: Request) -> Operator:
        presented = presented_key(request.headers)
        try:
            return await authenticate_operator(database, presented, clock)
        except Unauthenticated:
            note_refused_key(request, presented)
            raise

    return authenticate


def create_admin_app(services: AdminServices) -> FastAPI:
    """Return the admin API over ``services``; the caller opens and closes the services."""
    app = DescribedApi(
        title="weft admin",
        summary="What operators of weft do.",
        redirect_slashes=False,
        openapi_url=None,
        routes=list(ROUTES),
    )
    app.state.services = services
    install_error_handlers(app)
    app.add_middleware(RequestObserver, telemetry=services.runtime.telemetry, prefixes=(ADMIN_PREFIX,))
    return app


@_document.get("/openapi.json", tags=["document"])
async def document(caller: Caller, admin: Admin, request: Request) -> dict[str, Any]:
    """Return the OpenAPI document of the admin API."""
    del caller, admin
    api: FastAPI = request.app
    return api.openapi()


ROUTES = routes_of(*((ADMIN_PREFIX, router) for router in (*(module.router for module in _MODULES), _document)))
"""Routes of every admin API of a process."""
