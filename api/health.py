"""Health of this process without a key: ``/healthz`` for liveness, ``/readyz`` for load balancers."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse

from api.services import Services

liveness_router = APIRouter(tags=["health"])
readiness_router = APIRouter(tags=["health"])


class Health(BaseModel):
    """Answer of a living process."""

    status: Literal["ok"] = "ok"


@liveness_router.get("/healthz")
async def healthz() -> Health:
    """Answer that the process lives; needs no key."""
    return Health()


@readiness_router.get("/readyz")
async def readyz(services: Services) -> JSONResponse:
    """Answer 200 if every needed part of the process works, else 503; the body lists the parts. Needs no key."""
    verdict = await services.readiness.look()
    return JSONResponse(verdict.content(), status_code=verdict.status)
