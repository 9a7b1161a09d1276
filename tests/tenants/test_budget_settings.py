"""Budgets that are made later: what a tenant used before counts, as far back as it is known."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.database import Database, create_engine
from store.tables import UsageDay, UsageHour
from tenants.budget_settings import BudgetName, budgets_of, set_budget
from tenants.budgets import Period, SpentBudget
from tenants.prices import PricedQuantity
from tenants.project_limits import spent_and_limits
from tenants.spending import Spender, Spending, spend
from tenants.tenant_names import create_tenant

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
DAYS = {"2024-02-29": 1000, "2026-10-31": 500, "2026-11-01": 60, "2026-11-20": 7}
"""Tokens of days. The hours of today alone are kept."""


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(create_engine(database_url))
    yield opened
    await opened.close()


async def used(database: Database, tenant: TenantId, times: int) -> None:
    """Have the tenant used so many times the tokens of ``DAYS``."""
    sums = {"prompt_tokens": 0, "cached_prompt_tokens": 0, "sampled_tokens": 0, "operations": 1, "failed": 0}
    hour = UsageHour(
        tenant_id=tenant,
        hour=NOW,
        session_id="s",
        run_id="r",
        key_id=1,
        base_model="b",
        kind="forward_backward",
        train_tokens=7 * times,
        **sums,
    )
    async with database.write() as transaction:
        transaction.add(hour)
        for day, tokens in DAYS.items():
            row = UsageDay(tenant_id=tenant, day=day, base_model="b", kind="forward_backward", operations=1)
            row.tokens = tokens * times
            transaction.add(row)


def drawn(tenant: TenantId, tokens: int) -> Spending:
    """Return what a sample of so many tokens used."""
    return Spending(Spender(tenant, None), "b", NOW, {PricedQuantity.SAMPLED_TOKENS: tokens})


async def spent_periods(session: AsyncSession, tenant: TenantId, now: datetime) -> set[Period | str]:
    """Return the periods of the budgets that hold the tenant's work."""
    spent, _ = await spent_and_limits(session, tenant, None, now)
    return {SpentBudget.parse(one).period for one in (spent or "").split()}


async def test_a_new_budget_counts_days_whose_hours_are_no_longer_kept(database: Database) -> None:
    async with database.write() as transaction:
        cats = await create_tenant(transaction, name="cats", clock=lambda: NOW)
        dogs = await create_tenant(transaction, name="dogs", clock=lambda: NOW)
    await used(database, cats, 1)
    await used(database, dogs, 3)
    for owner, times in ((cats, 1), (dogs, 3)):
        for period in Period:
            async with database.write() as transaction:
                await set_budget(transaction, owner, BudgetName(period), 10_000, NOW)
        async with database.read() as session:
            found = {one.name.period: one.spent for one in await budgets_of(session, owner, NOW)}
        assert found == {Period.DAY: 7 * times, Period.MONTH: 67 * times, Period.TOTAL: 1567 * times}


async def test_a_clock_that_was_ahead_for_a_moment_holds_no_budget_that_begins_anew(database: Database) -> None:
    ahead = NOW + timedelta(days=400)
    async with database.write() as transaction:
        cats = await create_tenant(transaction, name="cats", clock=lambda: NOW)
        dogs = await create_tenant(transaction, name="dogs", clock=lambda: NOW)
        for owner in (cats, dogs):
            for period in (Period.DAY, Period.MONTH):
                await set_budget(transaction, owner, BudgetName(period), 10, NOW)
        await spend(transaction, [drawn(cats, 10)], ahead)
        await spend(transaction, [drawn(dogs, 10)], NOW)
    async with database.read() as session:
        # Until the clock is right again the budget holds, as any other.
        assert await spent_periods(session, cats, ahead) == {Period.DAY, Period.MONTH}
        assert await spent_periods(session, cats, NOW) == set()
        assert [one.spent for one in await budgets_of(session, cats, NOW)] == [0, 0]
        assert await spent_periods(session, dogs, NOW) == {Period.DAY, Period.MONTH}
    async with database.write() as transaction:
        await spend(transaction, [drawn(cats, 10)], NOW)
    tomorrow = NOW + timedelta(days=1)
    async with database.read() as session:
        assert await spent_periods(session, cats, NOW) == {Period.DAY, Period.MONTH}
        assert await spent_periods(session, cats, tomorrow) == {Period.MONTH}
        assert await spent_periods(session, dogs, tomorrow) == {Period.MONTH}
