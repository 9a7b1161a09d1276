"""``GET /usage/standing``: a tenant's limits, how much of each it uses, and what happens beyond."""

from fastapi import APIRouter
from pydantic import BaseModel

from api.authentication import UsageReader
from api.services import Services
from tenants.standing import standing

router = APIRouter(tags=["usage"])


class LimitReport(BaseModel):
    """A limit. ``used`` is null for a limit of single requests."""

    name: str
    value: int
    used: int | None
    is_reached: bool
    is_own: bool
    reason: str


class StandingReport(BaseModel):
    """The caller's share of passes, and its limits."""

    share: float
    limits: list[LimitReport]


@router.get("/usage/standing")
async def usage_standing(caller: UsageReader, services: Services) -> StandingReport:
    """Report the caller's limits and their use, as they are counted where they are enforced."""
    async with services.runtime.database.read() as session:
        found = await standing(session, caller.tenant, services.limits)
    return StandingReport(
        share=found.share,
        limits=[
            LimitReport(
                name=one.name,
                value=one.value,
                used=one.used,
                is_reached=one.is_reached,
                is_own=one.is_own,
                reason=one.reason,
            )
            for one in found.limits
        ],
    )
