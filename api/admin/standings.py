"""Bodies of a tenant's standing, as operators read it."""

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


class LimitStandingBody(BaseModel):
    """A limit. ``used`` is null for a limit of single requests."""

    name: str
    value: int
    used: int | None
    is_own: bool
    is_reached: bool
    reason: str


class RateStandingBody(BaseModel):
    """A rate. ``waiting`` tokens are charged and not worked off; ``remaining`` may run now; all are back in ``seconds``.

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


class RequestRateBody(BaseModel):
    """A rate of requests: ``used`` of the last minute; one more is answered in ``seconds``, 0 for now.

    ``key``: the first of the keys that share it; ``project``: id of the project that has it. Without both it is the tenant's.
    """

    per_minute: int
    used: int
    remaining: int
    seconds: int
    key: int | None
    project: str | None


class ProjectLimitBody(BaseModel):
    """A project's own limit. ``used`` is null for a limit of single requests, and for rates."""

    name: str
    value: int
    used: int | None
    is_reached: bool


class ProjectStandingBody(BaseModel):
    """A project with limits of its own, which hold beside its tenant's."""

    id: str
    name: str
    limits: list[ProjectLimitBody]


class StandingBody(BaseModel):
    """A tenant's share, the class whose factor is on it, its limits, rates, budgets, alerts, and projects with limits.

    ``request_rates`` is empty where requests are not counted: straight on the database.
    """

    share: float
    service_class: ServiceClass
    limits: list[LimitStandingBody]
    rates: list[RateStandingBody]
    request_rates: list[RequestRateBody]
    budgets: list[BudgetReport]
    money_budgets: list[MoneyBudgetReport]
    alerts: list[AlertReport]
    money_alerts: list[MoneyAlertReport]
    projects: list[ProjectStandingBody]


def standing_body(stands: Standing) -> StandingBody:
    """Return the body of a standing."""
    return StandingBody(
        share=stands.share,
        service_class=stands.service_class,
        limits=[LimitStandingBody.model_validate(one, from_attributes=True) for one in stands.limits],
        rates=[RateStandingBody.model_validate(one, from_attributes=True) for one in stands.rates],
        request_rates=[RequestRateBody.model_validate(one, from_attributes=True) for one in stands.request_rates],
        budgets=token_budgets(stands.budgets),
        money_budgets=money_budgets(stands.budgets),
        alerts=token_alerts(stands.alerts),
        money_alerts=money_alerts(stands.alerts),
        projects=[ProjectStandingBody.model_validate(one, from_attributes=True) for one in stands.projects],
    )
