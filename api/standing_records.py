"""A tenant's standing as it is told: its limits, rates and budgets, and how much of each it uses."""

from pydantic import BaseModel

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
from contracts.service_class import ServiceClass
from tenants.rates import Meter
from tenants.standing import Standing


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
    """A tenant's share, the class whose factor is on it, its limits, rates, budgets, latest alerts, and projects with limits.

    ``request_rates`` is empty where requests are not counted: for a command straight on the database.
    """

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


def standing_report(stands: Standing) -> StandingReport:
    """Return a standing as it is told."""
    return StandingReport(
        share=stands.share,
        service_class=stands.service_class,
        limits=[LimitReport.model_validate(one, from_attributes=True) for one in stands.limits],
        rates=[RateReport.model_validate(one, from_attributes=True) for one in stands.rates],
        request_rates=[RequestRateReport.model_validate(one, from_attributes=True) for one in stands.request_rates],
        budgets=token_budgets(stands.budgets),
        money_budgets=money_budgets(stands.budgets),
        alerts=token_alerts(stands.alerts),
        money_alerts=money_alerts(stands.alerts),
        projects=[ProjectReport.model_validate(one, from_attributes=True) for one in stands.projects],
    )
