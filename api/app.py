"""The ASGI application: the list of routers, the handlers of errors and the observer of requests."""

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from api import health
from api.admission import AdmissionEnd
from api.dashboard.app import PREFIX as UI_PREFIX
from api.dashboard.app import DashboardDoor, create_dashboard
from api.dashboard.security_headers import SecurityHeaders
from api.errors import install_error_handlers
from api.hub import repositories
from api.loop_turns import LoopTurns
from api.openai import chat, completions
from api.openai import models as openai_models
from api.openai.errors import unknown_routes_under
from api.openapi_document import DescribedApi
from api.request_observer import RequestObserver
from api.route_building import routes_of
from api.services import ApiServices
from api.tinker import (
    audit,
    billing,
    capabilities,
    checkpoints,
    client_config,
    custom_losses,
    downloads,
    futures,
    joint_polls,
    keys,
    models,
    runs,
    sampling,
    session_search,
    session_traces,
    sessions,
    sharing,
    telemetry,
    training,
    weights,
)
from api.weft import (
    adapters,
    client_exceptions,
    imports,
    jobs,
    operations,
    points,
    projects,
    sample_list,
    sample_stream,
    samplers,
    samples,
    standing,
    usage,
    usage_export,
    waiting,
    webhooks,
)
from api.weft import audit as weft_audit
from api.weft import checkpoints as weft_checkpoints
from api.weft import keys as weft_keys
from api.weft import runs as weft_runs

TINKER_PREFIX = "/api/v1"
"""Prefix of Tinker's endpoints and of weft's own."""
OPENAI_PREFIX = "/v1"
WEFT_PREFIX = "/api/weft/v1"
"""Prefix of weft's own endpoints that have nothing to do with Tinker's."""

_TINKER_MODULES = (
    futures,
    joint_polls,
    training,
    sampling,
    models,
    weights,
    sessions,
    session_search,
    telemetry,
    client_config,
    custom_losses,
    capabilities,
    keys,
    audit,
    billing,
    session_traces,
    downloads,
    sharing,
    checkpoints,
    runs,
)
"""Order matters, because the first match wins: busy endpoints come first, and ``downloads`` and ``sharing`` come before
``checkpoints``, whose open-ended paths would match theirs."""
_TINKER_PREFIXED = (adapters, samplers, samples, sample_stream)
"""weft's own modules under Tinker's prefix."""
_WEFT_MODULES = (
    standing,
    usage,
    usage_export,
    jobs,
    imports,
    points,
    waiting,
    weft_runs,
    projects,
    weft_keys,
    weft_audit,
    weft_checkpoints,
    operations,
    sample_list,
    client_exceptions,
    webhooks,
)
_OPENAI_MODULES = (chat, completions, openai_models)


def list_routers() -> list[tuple[str, APIRouter]]:
    """Return the prefix and the router of each part of the API, in the order in which they are asked."""
    return [
        *((TINKER_PREFIX, module.router) for module in (*_TINKER_MODULES, *_TINKER_PREFIXED)),
        *((OPENAI_PREFIX, module.router) for module in _OPENAI_MODULES),
        *((WEFT_PREFIX, module.router) for module in _WEFT_MODULES),
        (WEFT_PREFIX, adapters.list_router),
        ("", health.liveness_router),
        (TINKER_PREFIX, health.liveness_router),
        ("", health.readiness_router),
        # Last: a repository's id may hold anything.
        ("", repositories.router),
    ]


ROUTES = routes_of(*list_routers())
"""Routes of every API of a process."""


def create_app(services: ApiServices) -> FastAPI:
    """Return the API over ``services``; the caller opens and closes the services.

    Redirects of trailing slashes are off, because the SDK mishandles them. No route serves the OpenAPI document, nor
    pages that load scripts of others; ``docs/reference/routes.md`` is made from the document.
    """
    app = DescribedApi(
        title="weft",
        summary="Multi-tenant LoRA training; speaks the Tinker API.",
        redirect_slashes=False,
        openapi_url=None,
        routes=list(ROUTES),
    )
    app.state.services, app.state.is_tenants = services, True
    install_error_handlers(app)
    app.add_exception_handler(HTTPException, unknown_routes_under(OPENAI_PREFIX))
    app.state.dashboard = create_dashboard(services)
    app.add_middleware(DashboardDoor, dashboard=app.state.dashboard)
    app.add_middleware(AdmissionEnd)
    app.add_middleware(LoopTurns, loop_time=services.admission.loop_time)
    # Added last, so outermost: the log lines of the other middleware carry the request's trace id.
    app.add_middleware(
        RequestObserver,
        telemetry=services.runtime.telemetry,
        prefixes=(TINKER_PREFIX, OPENAI_PREFIX, WEFT_PREFIX, UI_PREFIX),
    )
    app.add_middleware(SecurityHeaders, pages=(UI_PREFIX,))
    proxies = [str(network) for network in services.runtime.settings.trusted_proxies]
    app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=proxies)
    return app
