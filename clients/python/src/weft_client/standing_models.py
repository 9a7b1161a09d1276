"""Records of a tenant's standing: limits, rates, budgets and alerts. ``weft_client.models`` has them too."""

from datetime import datetime
from decimal import Decimal
from typing import Literal

from weft_client.sampling_models import Record

Period = Literal["day", "month", "total"]


class LimitReport(Record):
    """A limit and its use; ``used`` None for a limit of single requests."""

    name: str
    value: int
    used: int | None = None
    is_reached: bool
    is_own: bool
    reason: str


class RateReport(Record):
    """A rate, of a key, of a project or else of the tenant: ``waiting`` tokens are not worked off yet, ``remaining`` may run
    now, all are back in ``seconds``.
    """

    meter: str
    per_minute: int
    burst: int
    waiting: int
    remaining: int
    seconds: float
    key: int | None = None
    project: str | None = None


class RequestRateReport(Record):
    """A rate of requests, of a key, of a project or else of the tenant: ``used`` came in the last minute, one more is answered in
    ``seconds``.
    """

    per_minute: int
    used: int
    remaining: int
    seconds: int
    key: int | None = None
    project: str | None = None


class BudgetReport(Record):
    """A budget in tokens, of a key, of a project or else of the tenant; ``resets_at`` None for a total one."""

    key: int | None = None
    project: str | None = None
    project_name: str | None = None
    period: str
    amount: int
    spent: int
    is_spent: bool
    resets_at: datetime | None = None


class MoneyBudgetReport(Record):
    """A budget in money, as ``BudgetReport``. Tokens without a price, ``unpriced_tokens``, count nothing in ``spent``."""

    key: int | None = None
    project: str | None = None
    project_name: str | None = None
    period: str
    currency: str
    amount: Decimal
    spent: Decimal
    unpriced_tokens: int
    is_spent: bool
    resets_at: datetime | None = None


class AlertReport(Record):
    """A crossing of ``percent`` of the amount of a budget in tokens."""

    key: int | None = None
    project: str | None = None
    period: str
    percent: int
    amount: int
    at: datetime


class MoneyAlertReport(Record):
    """A crossing of ``percent`` of the amount of a budget in money."""

    key: int | None = None
    project: str | None = None
    period: str
    currency: str
    percent: int
    amount: Decimal
    at: datetime


class ProjectLimitReport(Record):
    """A project's own limit and its use; ``used`` is None for a limit of single requests."""

    name: str
    value: int
    used: int | None = None
    is_reached: bool


class ProjectReport(Record):
    """A project with limits of its own, which hold beside the tenant's."""

    id: str
    name: str
    limits: list[ProjectLimitReport]


class StandingReport(Record):
    """Share of passes; limits, rates and budgets; the latest alerts, the newest first; projects with limits of their own."""

    share: float
    service_class: str
    limits: list[LimitReport]
    rates: list[RateReport]
    request_rates: list[RequestRateReport] = []
    budgets: list[BudgetReport]
    money_budgets: list[MoneyBudgetReport] = []
    alerts: list[AlertReport]
    money_alerts: list[MoneyAlertReport] = []
    projects: list[ProjectReport]
