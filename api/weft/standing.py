"""``GET /usage/standing``: a tenant's limits, rates and budgets, how much of each it uses, and what happens beyond."""

from dataclasses import asdict

from fastapi import APIRouter
from pydantic import BaseModel

from api.authentication import UsageReader
from api.budget_reports import (
    AlertReport,
    BudgetReport,
    MoneyAlertReport,
    MoneyBudgetReport,
    money_alerts,
    money_budgets,
    token_alerts,
    token_budgets,
)
from api.services import Services
from contracts.service_class import ServiceClass
from tenants.rates import Meter
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


class RateReport(BaseModel):
    """A rate. ``waiting`` tokens are charged and not worked off yet; ``remaining`` may run now; all are back in ``seconds``.

    ``key``: the first of the keys that share it; ``project``: id of the project that has it. Without both it is the tenant's.
    """

    meter: Meter
    per_minute: int
    burst: int
    waiting: int
    remaining: int
    seconds: float
    key: int | None
    project: str | None


class RequestRateReport(BaseModel):
    """A rate of requests: ``used`` of the last minute; one more is answered in ``seconds``, 0 for now.

    ``key``: the first of the keys that share it; ``project``: id of the project that has it. Without both it is the tenant's.
    """

    per_minute: int
    used: int
    remaining: int
    seconds: int
    key: int | None
    project: str | None


class ProjectLimitReport(BaseModel):
    """A project's own limit. ``used`` is null for a limit of single requests, and for rates."""

    name: str
    value: int
    used: int | None
    is_reached: bool


class ProjectReport(BaseModel):
    """A project with limits of its own, which hold beside the tenant's."""

    id: str
    name: str
    limits: list[ProjectLimitReport]


class StandingReport(BaseModel):
    """The caller's share, its class, its limits, rates and budgets, its latest alerts, and the projects with limits."""

    share: float
    service_class: ServiceClass
    limits: list[LimitReport]
    rates: list[RateReport]
    request_rates: list[RequestRateReport]
    budgets: list[BudgetReport]
    money_budgets: list[MoneyBudgetReport]
    alerts: list[AlertReport]
    money_alerts: list[MoneyAlertReport]
    projects: list[ProjectReport]


@router.get("/usage/standing")
async def usage_standing(caller: UsageReader, services: Services) -> StandingReport:
    """Report the caller's limits, rates and budgets with their use, as they are counted where they are enforced."""
    async with services.runtime.database.read() as session:
        now, counted = services.runtime.clock(), services.runtime.request_rates
        found = await standing(session, caller.tenant, services.limits, now, caller.reach, counted)
    return StandingReport(
        share=found.share,
        service_class=found.service_class,
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
        rates=[RateReport(**asdict(one)) for one in found.rates],
        request_rates=[RequestRateReport(**asdict(one)) for one in found.request_rates],
        budgets=token_budgets(found.budgets),
        money_budgets=money_budgets(found.budgets),
        alerts=token_alerts(found.alerts),
        money_alerts=money_alerts(found.alerts),
        projects=[ProjectReport.model_validate(one, from_attributes=True) for one in found.projects],
    )
