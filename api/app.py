"""The ASGI application: the list of routers, the handlers of errors and the observer of requests."""

from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from api import health
from api.admission import AdmissionEnd
from api.errors import install_error_handlers
from api.hub import repositories
from api.loop_turns import LoopTurns
from api.openai import chat, completions
from api.openai import models as openai_models
from api.openapi_document import DescribedApi
from api.request_observer import RequestObserver
from api.services import ApiServices
from api.tinker import (
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
    not_offered,
    runs,
    sampling,
    session_search,
    session_traces,
    sessions,
    telemetry,
    training,
    weights,
)
from api.weft import adapters, imports, jobs, points, projects, sample_stream, samplers, samples, standing, usage
from api.weft import keys as weft_keys

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
    billing,
    not_offered,
    session_traces,
    downloads,
    checkpoints,
    runs,
)
"""Order matters, because the first match wins: busy endpoints come first, and ``not_offered`` comes before
``checkpoints``, whose open-ended paths would match its paths."""
_WEFT_MODULES = (adapters, samplers, samples, sample_stream)
_OPENAI_MODULES = (chat, completions, openai_models)


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
    )
    app.state.services = services
    install_error_handlers(app)
    app.add_middleware(AdmissionEnd)
    app.add_middleware(LoopTurns, loop_time=services.admission.loop_time)
    # Added last, so outermost: the log lines of the other middleware carry the request's trace id.
    app.add_middleware(
        RequestObserver, telemetry=services.runtime.telemetry, prefixes=(TINKER_PREFIX, OPENAI_PREFIX, WEFT_PREFIX)
    )
    proxies = [str(network) for network in services.runtime.settings.trusted_proxies]
    app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=proxies)
    for module in (*_TINKER_MODULES, *_WEFT_MODULES):
        app.include_router(module.router, prefix=TINKER_PREFIX)
    for module in _OPENAI_MODULES:
        app.include_router(module.router, prefix=OPENAI_PREFIX)
    for module in (standing, usage, jobs, imports, points, projects, weft_keys):
        app.include_router(module.router, prefix=WEFT_PREFIX)
    app.include_router(health.liveness_router)
    app.include_router(health.liveness_router, prefix=TINKER_PREFIX)
    app.include_router(health.readiness_router)
    # Last: a repository's id may hold anything.
    app.include_router(repositories.router)
    return app
