"""Budgets of tenants, of their keys and of their projects: tokens or money for a day, a month or in total.

A key that takes another one's place spends of the same budgets (``payer_of``). Work is bounded by the budgets of the project
that its session is in now.

What an operation used is added in the transaction that ends it (``tenants.spending``). Once a budget is spent, new work is
refused (402) and what was accepted waits until the budget is raised or its period ends. Days and months are UTC.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Self, cast

from sqlalchemy import ColumnElement, String, Table, bindparam, func, literal_column, or_, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import BudgetSpent
from contracts.ids import TenantId
from contracts.stored_words import known
from store.tables import ApiKey, Budget, Run, Sampler, Session
from store.tables.base import UtcDateTime

TOKENS = "tokens"
"""Meter of budgets in tokens; that of one in money is its currency."""
TENANT, KEY, PROJECT = "tenant", "key", "project"

budgets = cast(Table, Budget.__table__)
BUDGET_ID = (budgets.c.tenant_id, budgets.c.scope, budgets.c.scope_id, budgets.c.period, budgets.c.meter)


class Period(StrEnum):
    """Time after which a budget begins anew; a ``total`` one never does."""

    DAY = "day"
    MONTH = "month"
    TOTAL = "total"

    def start(self, now: datetime) -> datetime:
        """Return the beginning of the period in which ``now`` is."""
        day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self is Period.TOTAL:
            return datetime.min.replace(tzinfo=UTC)
        return day if self is Period.DAY else day.replace(day=1)

    def end(self, now: datetime) -> datetime | None:
        """Return the end of the period in which ``now`` is."""
        if self is Period.TOTAL:
            return None
        return self.start(self.start(now) + timedelta(days=1 if self is Period.DAY else 32))

    def latest_end(self, now: datetime) -> datetime | None:
        """Return the end of the next period, which a clock that is a little ahead may have begun."""
        end = self.end(now)
        return None if end is None else self.end(end)

    def is_over(self, end: datetime, now: datetime) -> bool:
        """Return whether a period with that end is not the one of ``now``, nor the next one.

        One that ends later yet was begun while the clock was wrong. It would hold work for as long as the clock was ahead.
        """
        latest = self.latest_end(now)
        return end <= now or (latest is not None and end > latest)


_NOW = bindparam("budget_now", type_=UtcDateTime())
_LATEST = {
    period: bindparam(f"budget_{period}_latest", type_=UtcDateTime()) for period in Period if period is not Period.TOTAL
}
paying_keys = cast(Table, ApiKey.__table__).alias("paying_key")
PAYER = func.coalesce(paying_keys.c.budget_key, paying_keys.c.id)
_sessions = cast(Table, Session.__table__).alias("paying_session")
_IS_OVER = or_(
    budgets.c.resets_at <= _NOW,
    # As ``Period.is_over``. The end of a period that only another version knows is that version's to judge.
    *(
        (budgets.c.period == literal_column(f"'{one}'")) & (budgets.c.resets_at > latest)
        for one, latest in _LATEST.items()
    ),
)
_IS_SPENT = (budgets.c.spent >= budgets.c.amount) & (budgets.c.resets_at.is_(None) | ~_IS_OVER)
_SCOPES: dict[str, ColumnElement[str]] = {scope: literal_column(f"'{scope}'") for scope in (TENANT, KEY, PROJECT)}


def budget_keys(now: datetime) -> dict[str, Any]:
    """Return the parameters of a query that asks for spent budgets."""
    return {"budget_now": now, **{latest.key: period.latest_end(now) for period, latest in _LATEST.items()}}


@dataclass(frozen=True, slots=True)
class SpentBudget:
    """A budget of which nothing is left. ``meter``: ``tokens`` or a currency.

    ``period``: text for one that only another version knows. The budget bounds work all the same.
    """

    scope: str
    scope_id: str
    period: Period | str
    meter: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the budget that a part of ``spent_budgets`` names."""
        scope, scope_id, period, meter = text.split("/")
        return cls(scope, scope_id, known(Period, period, period), meter)

    def ends(self, now: datetime) -> datetime | None:
        """Return when its period ends; None for a total one, and for one that only another version knows."""
        return self.period.end(now) if isinstance(self.period, Period) else None

    def told(self, now: datetime) -> str:
        """Return in words that it is spent, and when work goes on."""
        whose = {TENANT: "this tenant's", KEY: "this API key's"}.get(self.scope, "this project's")
        end = self.ends(now)
        until = "" if end is None else f" or until {end:%Y-%m-%d %H:%M} UTC"
        which = "total budget" if self.period is Period.TOTAL else f"budget of the {self.period}"
        return f"{whose} {which} in {self.meter} is spent; work goes on once it is raised{until}"


def spent_budgets(owner: ColumnElement[Any]) -> ColumnElement[str | None]:
    """Return the spent budgets of ``owner``, as one column that ``first_spent`` reads, of a query with ``budget_keys``."""
    named = budgets.c.scope + "/" + budgets.c.scope_id + "/" + budgets.c.period + "/" + budgets.c.meter
    return select(func.aggregate_strings(named, " ")).where(budgets.c.tenant_id == owner, _IS_SPENT).scalar_subquery()


def payer_of(key: ColumnElement[Any]) -> ColumnElement[int | None]:
    """Return the key whose budgets bound work by ``key``: itself, or the first of those whose place it took."""
    payer = select(PAYER).where(paying_keys.c.id == key)
    return payer.correlate_except(paying_keys).scalar_subquery()


def project_of(owner: ColumnElement[Any], lane: ColumnElement[Any]) -> ColumnElement[str]:
    """Return the project that the session of a lane is in now, the default one for a session without."""
    found: list[ColumnElement[Any]] = []
    for name, table in (("paying_run", Run.__table__), ("paying_sampler", Sampler.__table__)):
        lanes = cast(Table, table).alias(name)
        project = (
            select(_sessions.c.project).join(lanes, lanes.c.session_id == _sessions.c.id).where(lanes.c.id == lane)
        )
        found.append(project.correlate_except(_sessions, lanes).scalar_subquery())
    return func.coalesce(*found, owner)


def first_spent(found: str | None, payer: int | None, project: str) -> SpentBudget | None:
    """Return a spent budget that bounds work of the key ``payer`` in that project, None if none does."""
    bounding = {TENANT: "", KEY: str(payer), PROJECT: project}
    spent = map(SpentBudget.parse, (found or "").split())
    return next((one for one in spent if bounding.get(one.scope) == one.scope_id), None)


def is_spent_for(owner: ColumnElement[Any], key: ColumnElement[Any], lane: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a spent budget holds work of ``owner`` by ``key`` in ``lane``. The query has ``budget_keys``."""
    bounds_it = (
        (budgets.c.scope == _SCOPES[TENANT])
        | ((budgets.c.scope == _SCOPES[KEY]) & (budgets.c.scope_id == sql_cast(payer_of(key), String)))
        | ((budgets.c.scope == _SCOPES[PROJECT]) & (budgets.c.scope_id == project_of(owner, lane)))
    )
    return select(budgets.c.tenant_id).where(budgets.c.tenant_id == owner, _IS_SPENT, bounds_it).exists()


def refusal(found: str | None, payer: int | None, project: str, now: datetime) -> BudgetSpent | None:
    """Return the error of new work by the key ``payer`` in that project, None if no budget that bounds it is spent."""
    spent = first_spent(found, payer, project)
    return None if spent is None else BudgetSpent(spent.told(now))


async def has_budget(session: AsyncSession, tenant: TenantId, payer: int) -> bool:
    """Return whether a budget of the tenant's key ``payer`` bounds work by it."""
    own = select(budgets.c.tenant_id).where(
        budgets.c.tenant_id == tenant, budgets.c.scope == KEY, budgets.c.scope_id == str(payer)
    )
    return (await session.execute(own.limit(1))).first() is not None
