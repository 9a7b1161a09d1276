"""``GET /usage/standing``: a tenant's limits, rates and budgets, how much of each it uses, and what happens beyond."""

from fastapi import APIRouter

from api.authentication import UsageReader
from api.services import Services
from api.standing_records import StandingReport, standing_report
from tenants.standing import standing

router = APIRouter(tags=["usage"])


@router.get("/usage/standing")
async def usage_standing(caller: UsageReader, services: Services) -> StandingReport:
    """Report the caller's limits, rates and budgets with their use, as they are counted where they are enforced."""
    async with services.runtime.database.read() as session:
        now, counted = services.runtime.clock(), services.runtime.request_rates
        found = await standing(session, caller.tenant, services.limits, now, caller.reach, counted)
    return standing_report(found)
