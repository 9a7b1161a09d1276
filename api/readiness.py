"""Whether this process is able to serve: ``/readyz``, without a key, for load balancers."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from api.services import Services

router = APIRouter(tags=["health"])


@router.get("/readyz")
async def readyz(services: Services) -> JSONResponse:
    """200 while every part that is needed is able, else 503; the body says which is not."""
    verdict = await services.readiness.look()
    return JSONResponse(verdict.content(), status_code=verdict.status)
