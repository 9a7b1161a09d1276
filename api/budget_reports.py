"""Reports of budgets and of their alerts, as the standing of a tenant tells them to it and to operators."""

from datetime import datetime

from pydantic import BaseModel

from tenants.budget_settings import Alert, BudgetStanding
from tenants.budgets import Period
from tenants.prices import cost_text


class BudgetReport(BaseModel):
    """A budget in tokens, of the key with that number, of the project, or else of the whole tenant.

    ``resets_at`` is null for a total one.
    """

    key: int | None
    project: str | None
    project_name: str | None
    period: Period
    amount: int
    spent: int
    is_spent: bool
    resets_at: datetime | None


class MoneyBudgetReport(BaseModel):
    """A budget in money, as decimal text. Tokens without a price, ``unpriced_tokens``, count nothing in ``spent``."""

    key: int | None
    project: str | None
    project_name: str | None
    period: Period
    currency: str
    amount: str
    spent: str
    unpriced_tokens: int
    is_spent: bool
    resets_at: datetime | None


class AlertReport(BaseModel):
    """A crossing of ``percent`` of the amount of a budget in tokens."""

    key: int | None
    project: str | None
    period: Period
    percent: int
    amount: int
    at: datetime


class MoneyAlertReport(BaseModel):
    """A crossing of ``percent`` of the amount of a budget in money."""

    key: int | None
    project: str | None
    period: Period
    currency: str
    percent: int
    amount: str
    at: datetime


def token_budgets(found: list[BudgetStanding]) -> list[BudgetReport]:
    """Return the reports of the budgets in tokens."""
    return [
        BudgetReport(
            key=one.name.key,
            project=one.name.project,
            project_name=one.project_name,
            period=one.name.period,
            amount=int(one.amount),
            spent=int(one.spent),
            is_spent=one.is_spent,
            resets_at=one.resets_at,
        )
        for one in found
        if one.name.currency is None
    ]


def money_budgets(found: list[BudgetStanding]) -> list[MoneyBudgetReport]:
    """Return the reports of the budgets in money."""
    return [
        MoneyBudgetReport(
            key=one.name.key,
            project=one.name.project,
            project_name=one.project_name,
            period=one.name.period,
            currency=one.name.currency,
            amount=cost_text(one.amount) or "",
            spent=cost_text(one.spent) or "",
            unpriced_tokens=one.unpriced,
            is_spent=one.is_spent,
            resets_at=one.resets_at,
        )
        for one in found
        if one.name.currency is not None
    ]


def token_alerts(found: list[Alert]) -> list[AlertReport]:
    """Return the reports of alerts of budgets in tokens."""
    return [
        AlertReport(
            key=one.name.key,
            project=one.name.project,
            period=one.name.period,
            percent=one.percent,
            amount=int(one.amount),
            at=one.at,
        )
        for one in found
        if one.name.currency is None
    ]


def money_alerts(found: list[Alert]) -> list[MoneyAlertReport]:
    """Return the reports of alerts of budgets in money."""
    return [
        MoneyAlertReport(
            key=one.name.key,
            project=one.name.project,
            period=one.name.period,
            currency=one.name.currency,
            percent=one.percent,
            amount=cost_text(one.amount) or "",
            at=one.at,
        )
        for one in found
        if one.name.currency is not None
    ]
