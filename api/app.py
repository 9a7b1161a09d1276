"""The ASGI application: routers under ``/api/v1``, one way to render errors, nothing else in a request's way."""

from fastapi import FastAPI

from api import readiness
from api.errors import install_error_handlers
from api.observation import RequestObserver
from api.openai import chat, completions
from api.openai import models as openai_models
from api.services import ApiServices
from api.tinker import (
    capabilities,
    checkpoints,
    config,
    downloads,
    futures,
    keys,
    models,
    not_offered,
    runs,
    sampling,
    sessions,
    telemetry,
    training,
    weights,
)
from api.weft import adapters, samplers, samples, streaming

TINKER_PREFIX = "/api/v1"
OPENAI_PREFIX = "/v1"

# The first match wins: busy endpoints stand first, and `not_offered` names paths that the open-ended checkpoint routes
# would take.
_TINKER_MODULES = (
    futures,
    training,
    sampling,
    models,
    weights,
    sessions,
    telemetry,
    config,
    capabilities,
    keys,
    not_offered,
    downloads,
    checkpoints,
    runs,
)


def create_app(services: ApiServices) -> FastAPI:
    """The API over ``services``, which its starter opens and closes. Redirects are off: the SDK mishandles them."""
    app = FastAPI(title="weft", summary="Multi-tenant LoRA training; speaks the Tinker API.", redirect_slashes=False)
    app.state.services = services
    install_error_handlers(app)
    # Last is outermost: what the others log belongs to the request.
    app.add_middleware(RequestObserver, telemetry=services.telemetry, prefixes=(TINKER_PREFIX, OPENAI_PREFIX))
    for module in _TINKER_MODULES:
        app.include_router(module.router, prefix=TINKER_PREFIX)
    for module in (adapters, samplers, samples, streaming):
        app.include_router(module.router, prefix=TINKER_PREFIX)
    for module in (chat, completions, openai_models):
        app.include_router(module.router, prefix=OPENAI_PREFIX)
    app.include_router(config.health_router)
    app.include_router(config.health_router, prefix=TINKER_PREFIX)
    app.include_router(readiness.router)
    return app
