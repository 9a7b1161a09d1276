"""Settings of budgets: which a tenant has, what is spent of each, and the alerts that were recorded."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from store.inserts import insert_unless_present
from store.tables import Budget, Project
from tenants.budgets import BUDGET_ID, KEY, PAYER, PROJECT, TENANT, TOKENS, Period, budgets, paying_keys
from tenants.prices import EXACT, Tariff, currency_of, tariff
from tenants.projects import DEFAULT_NAME
from tenants.reach import Owner, Reach, default_project, tenant_of
from tenants.spending import PARTS, Added, alert, alerts, amount_told, parts_of, payers_of
from tenants.usage import tokens_since
from tenants.usage_costs import quantities, sums_of
from tenants.usage_hours import BucketWidth, Dimension, UsageLine, usage_lines

MOST = 2**53
_UNIT_PLACES = 6
"""Decimal places of one unit of a budget in money."""
_LINES = 10_000


@dataclass(frozen=True, slots=True)
class BudgetName:
    """Budget of a tenant: for a period, of all of it or of a key or a project, in tokens or in a currency."""

    period: Period
    key: int | None = None
    project: str | None = None
    currency: str | None = None

    @property
    def meter(self) -> str:
        """Meter of the budget's row."""
        return self.currency or TOKENS


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """A budget and what is spent of it, in tokens or in the name's currency.

    The name's key is the first of those that share the budget. ``unpriced``: tokens that had no price.
    """

    name: BudgetName
    project_name: str | None
    amount: Decimal
    spent: Decimal
    unpriced: int
    resets_at: datetime | None

    @property
    def is_spent(self) -> bool:
        """True when nothing is left."""
        return self.spent >= self.amount


@dataclass(frozen=True, slots=True)
class Alert:
    """A budget's crossing of ``percent`` of its amount."""

    name: BudgetName
    percent: int
    amount: Decimal
    at: datetime


async def set_budget(
    transaction: AsyncSession, tenant: TenantId, name: BudgetName, amount: Decimal | int | None, now: datetime
) -> None:
    """Give the tenant a budget of that name, or another amount of it; None takes it away. Raises ``InvalidRequest``.

    What was used in this period before counts.
    """
    payer = None if name.key is None else (await payers_of(transaction, [name.key])).get(name.key, name.key)
    scope = (
        (KEY, str(payer)) if payer is not None else (TENANT, "") if name.project is None else (PROJECT, name.project)
    )
    values = dict(zip((column.name for column in BUDGET_ID), (tenant, *scope, name.period, name.meter), strict=True))
    this = and_(*(budgets.c[column] == value for column, value in values.items()))
    if amount is None:
        await transaction.execute(delete(budgets).where(this))
        return
    units = await _units(transaction, name, amount)
    new = {**values, "amount": units, "spent": 0, "rest": 0, "unpriced": 0, "resets_at": name.period.end(now)}
    added = insert_unless_present(transaction, Budget).values(new).returning(Budget.tenant_id)
    change: dict[str, int] = {"amount": units}
    if await transaction.scalar(added) is not None:
        used = await _used(transaction, tenant, payer, name, now)
        spent, rest = divmod(used.parts, PARTS)
        change |= {"spent": spent, "rest": rest, "unpriced": used.unpriced}
    await transaction.execute(update(budgets).where(this).values(change))
    row = (await transaction.execute(select(budgets).where(this))).one()
    # What is spent already may be beyond a mark of the new amount. What was spent in an earlier period is not.
    spent_now = 0 if _is_over(row, now) else row.spent * PARTS + row.rest
    await alert(transaction, row, before=0, after=spent_now, now=now)


def amount_of(text: str) -> Decimal:
    """Return the amount that a text gives. Raises ``InvalidRequest``."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise InvalidRequest(f"an amount is a decimal number, such as 250.00; got {text[:50]!r}") from None


async def _units(session: AsyncSession, name: BudgetName, amount: Decimal | int) -> int:
    """Return the amount in units of a budget's row. Raises ``InvalidRequest``."""
    # Far above any budget, where no arithmetic is exact.
    exact = Decimal(amount) if Decimal(amount).is_finite() and Decimal(amount) <= MOST else Decimal(0)
    if name.currency is None:
        if exact != exact.to_integral_value(context=EXACT) or not 1 <= exact <= MOST:
            raise InvalidRequest(f"a budget must be 1 to {MOST} tokens, or `none`; got {amount}")
        return int(exact)
    known = await currency_of(session)
    if known != name.currency:
        told = "there are no prices yet: add them first" if known is None else f"all prices are in {known}"
        raise InvalidRequest(f"a budget in {name.currency[:20]!r} would count nothing; {told}")
    units = exact.scaleb(_UNIT_PLACES, context=EXACT)
    if units != units.to_integral_value(context=EXACT) or not 1 <= units <= MOST:
        most = MOST // 10**_UNIT_PLACES
        raise InvalidRequest(
            f"a budget in money is above 0, at most {most}, with {_UNIT_PLACES} decimal places; got {amount}"
        )
    return int(units)


async def _used(session: AsyncSession, tenant: TenantId, payer: int | None, name: BudgetName, now: datetime) -> Added:
    """Return what was used in the period of ``now``, by the keys that spend of ``payer``'s budgets or in the project.

    Days are kept for ever, and have all tokens of a tenant. What else there is to tell apart is known as long as hours are kept.
    """
    if payer is None and name.project is None and name.currency is None:
        return Added(await tokens_since(session, tenant, name.period.start(now)) * PARTS)
    owner: Owner = tenant if name.project is None else Reach(tenant, frozenset({name.project}))
    mine = select(paying_keys.c.id).where(PAYER.in_([payer]), paying_keys.c.tenant_id == tenant)
    # The first of those keys may have ended long ago, so that its row is gone.
    keys = set() if payer is None else {payer, *await session.scalars(mine)}
    since, before = name.period.start(now), now + timedelta(hours=1)
    prices = Tariff() if name.currency is None else await tariff(session, tenant)
    used = Added()
    # In each part of the time every price is one.
    edges = [since, *prices.changes(since, before), before]
    for begin, end in pairwise(edges):
        async for line in every_line(
            session, owner, begin, end, {Dimension.KEY, Dimension.BASE_MODEL}, BucketWidth.DAY
        ):
            if payer is None or line.key in keys:
                used += cost_of_line(prices, line, begin) if name.currency else Added(tokens_of(line) * PARTS)
    return used


def tokens_of(line: UsageLine) -> int:
    """Return the tokens of a line of usage."""
    return line.train_tokens + line.prompt_tokens + line.sampled_tokens


def cost_of_line(prices: Tariff, line: UsageLine, hour: datetime) -> Added:
    """Return what a budget in money is charged for the line, at the prices of an hour."""
    cost, unpriced = prices.known_cost(quantities(sums_of(line)), line.base_model, hour)
    return Added(parts_of(cost), unpriced)


async def every_line(
    session: AsyncSession, owner: Owner, since: datetime, before: datetime, by: set[Dimension], width: BucketWidth
) -> AsyncIterator[UsageLine]:
    """Yield the lines of usage, page by page."""
    last: UsageLine | None = None
    while lines := await usage_lines(
        session, owner, since=since, before=before, by=by, width=width, limit=_LINES, after=last
    ):
        for line in lines:
            yield line
        last = lines[-1]


async def budgets_of(session: AsyncSession, owner: Owner, now: datetime) -> list[BudgetStanding]:
    """Return the budgets of the tenant, its keys and the projects that are reached, with what is spent in ``now``'s period.

    Those with a scope or a period that only another version knows are left out.
    """
    mine = (budgets.c.tenant_id == tenant_of(owner), *known_budgets(budgets), *_reached(budgets, owner))
    rows = (await session.execute(select(budgets).where(*mine).order_by(*BUDGET_ID))).all()
    names = await _project_names(session, tenant_of(owner), {row.scope_id for row in rows if row.scope == PROJECT})
    found = []
    for row in rows:
        name = _name(row)
        spent, unpriced = (0, 0) if _is_over(row, now) else (row.spent * PARTS + row.rest, row.unpriced)
        amount, ends = amount_told(row.amount * PARTS, row.meter), name.period.end(now)
        project = names.get(name.project or "")
        found.append(BudgetStanding(name, project, amount, amount_told(spent, row.meter), unpriced, ends))
    return found


async def alerts_of(session: AsyncSession, owner: Owner, *, most: int = 100) -> list[Alert]:
    """Return the latest alerts of the tenant, its keys and the projects that are reached, the newest first."""
    mine = select(alerts).where(
        alerts.c.tenant_id == tenant_of(owner), *known_budgets(alerts), *_reached(alerts, owner)
    )
    newest = mine.order_by(alerts.c.at.desc(), alerts.c.percent.desc())
    return [alert_of(row) for row in await session.execute(newest.limit(most))]


def alert_of(row: Any) -> Alert:
    """Return the alert in a row of ``budget_alerts``."""
    return Alert(_name(row), row.percent, amount_told(row.amount * PARTS, row.meter), row.at)


def _is_over(row: Any, now: datetime) -> bool:
    """Return whether the period in which the budget's ``spent`` was has ended."""
    return row.resets_at is not None and Period(row.period).is_over(row.resets_at, now)


def _reached(table: Table, owner: Owner) -> list[ColumnElement[bool]]:
    """Return the conditions on rows of budgets, or of alerts, that leave out those of projects that are not reached."""
    if not isinstance(owner, Reach):
        return []
    return [or_(table.c.scope != PROJECT, table.c.scope_id.in_(sorted(owner.projects)))]


def known_budgets(table: Table) -> list[ColumnElement[bool]]:
    """Return the conditions on rows of budgets, or of alerts, with a scope and a period that this version knows."""
    return [table.c.scope.in_([TENANT, KEY, PROJECT]), table.c.period.in_([*Period])]


def _name(row: Any) -> BudgetName:
    return BudgetName(
        period=Period(row.period),
        key=int(row.scope_id) if row.scope == KEY else None,
        project=row.scope_id if row.scope == PROJECT else None,
        currency=None if row.meter == TOKENS else row.meter,
    )


async def _project_names(session: AsyncSession, tenant: TenantId, projects: set[str]) -> dict[str, str]:
    if not projects:
        return {}
    rows = await session.execute(select(Project.id, Project.name).where(Project.id.in_(projects)))
    return {default_project(tenant): DEFAULT_NAME} | {row.id: row.name for row in rows}
