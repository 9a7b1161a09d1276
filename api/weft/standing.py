"""``GET /usage/standing``: a tenant's limits, rates and budgets, how much of each it uses, and what happens beyond."""

from fastapi import APIRouter, Response

from api.authentication import UsageReader
from api.services import Services
from api.standing_records import StandingReport, standing_report
from tenants.standing import standing

router = APIRouter(tags=["usage"])


@router.get("/usage/standing", response_model=StandingReport)
async def usage_standing(caller: UsageReader, services: Services) -> Response:
    """Report the caller's limits, rates and budgets with their use, as they are counted where they are enforced."""
    found = await own_standing(caller, services)
    return Response(found.model_dump_json(), media_type="application/json")


async def own_standing(caller: UsageReader, services: Services) -> StandingReport:
    """Return the caller's standing, made on a thread: it may tell of thousands of keys and projects."""
    async with services.runtime.database.survey() as session:
        now, counted = services.runtime.clock(), services.runtime.request_rates
        found = await standing(session, caller.tenant, services.limits, now, caller.reach, counted)
    return await services.admission.threads.run(caller.tenant, standing_report, found)
