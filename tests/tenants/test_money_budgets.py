"""Budgets in money are charged what usage costs, to the last digit, at the prices of the hours in which it was used."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal

import pytest
from sqlalchemy import event, update

from contracts.errors import InvalidRequest
from contracts.ids import SessionId
from store.tables import ApiKey, Session
from tenants import price_additions
from tenants.budget_settings import Alert, BudgetName, BudgetStanding, alerts_of, budgets_of, set_budget
from tenants.budgets import Period
from tenants.keys import create_key, find_key, forget_ended_keys, rotate_key
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity, tariff
from tenants.projects import create_project
from tenants.reach import Reach
from tenants.spending import Spender, Spending, spend
from tenants.tenant_names import create_tenant
from tenants.usage_costs import priced
from tenants.usage_exports import usage_records
from tenants.usage_hours import BucketWidth
from tests.tenants.usage_books import NOON, Books

HOUR = timedelta(hours=1)
DAY = BudgetName(Period.DAY, currency="USD")


async def price(
    books: Books,
    meter: PricedQuantity,
    amount: str,
    *,
    base: str | None = None,
    who: int | None = None,
    at: datetime = NOON,
) -> None:
    """Add a price from the hour of ``at`` on, in that hour."""
    async with books.database.write() as transaction:
        tenant = None if who is None else books.tenants[who]
        await add_price(transaction, NewPrice(meter, amount, "USD", base, tenant=tenant), lambda: at)


async def budget(books: Books, who: int, amount: str | None, name: BudgetName = DAY, *, at: datetime = NOON) -> None:
    async with books.database.write() as transaction:
        await set_budget(transaction, books.tenants[who], name, None if amount is None else Decimal(amount), at)


async def used(
    books: Books, who: int, tokens: int, *, at: datetime = NOON, base: str = "tiny", key: int | None = None
) -> None:
    """End a pass as a trainer does: its row, and what it spends."""
    await books.ended(who, at, tokens=tokens, base_model=base, key_id=key)
    hour = at.replace(minute=0, second=0, microsecond=0)
    spender = Spender(books.tenants[who], key, books.sessions[who])
    async with books.database.write() as transaction:
        await spend(transaction, [Spending(spender, base, hour, {PricedQuantity.TRAIN_TOKENS: tokens})], at)


async def stands(books: Books, who: int, *, at: datetime = NOON) -> list[BudgetStanding]:
    async with books.database.read() as session:
        return await budgets_of(session, books.tenants[who], at)


async def spent(books: Books, who: int, *, at: datetime = NOON) -> Decimal:
    (one,) = await stands(books, who, at=at)
    return one.spent


async def alerts(books: Books, who: int) -> Sequence[Alert]:
    async with books.database.read() as session:
        return await alerts_of(session, books.tenants[who])


async def move(books: Books, who: int, project: str | None) -> None:
    async with books.database.write() as transaction:
        await transaction.execute(update(Session).where(Session.id == books.sessions[who]).values(project=project))


async def cost(books: Books, who: int) -> Decimal | None:
    """Return the cost of the day by its usage."""
    lines = await books.lines(who, width=BucketWidth.DAY)
    async with books.database.read() as session:
        bounds = {"since": NOON - timedelta(days=1), "before": NOON + timedelta(days=1)}
        _, found = await priced(session, books.tenants[who], lines, **bounds, by=(), width=BucketWidth.DAY)
    return found[0].cost


async def test_a_budget_is_charged_what_usage_costs_across_a_price_that_begins_at_noon(books: Books) -> None:
    await price(books, PricedQuantity.TRAIN_TOKENS, "3.0000000001", at=NOON - HOUR)
    await budget(books, 0, "1000", at=NOON - HOUR)
    await used(books, 0, 333, at=NOON - HOUR)
    await price(books, PricedQuantity.TRAIN_TOKENS, "7.3", at=NOON)
    for at in (NOON, NOON + timedelta(minutes=59)):
        await used(books, 0, 1, at=at)
    expected = 333 * Decimal("0.0000030000000001") + 2 * Decimal("0.0000073")
    assert await spent(books, 0) == expected == await cost(books, 0)
    # One that is set later counts the same, before and after what it counts was rolled up.
    for _ in range(2):
        await budget(books, 0, None)
        await budget(books, 0, "1000")
        assert await spent(books, 0) == expected
        await books.prune(NOON + HOUR)
    assert await stands(books, 1) == []


async def test_a_price_of_the_running_hour_charges_what_was_used_in_it_anew(books: Books) -> None:
    await price(books, PricedQuantity.TRAIN_TOKENS, "2", at=NOON - HOUR)
    for who in (0, 1):
        await budget(books, who, "0.00005", at=NOON - HOUR)
        await used(books, who, 10, at=NOON - HOUR)
        await used(books, who, 5, at=NOON)
    assert await spent(books, 0) == Decimal("0.00003")
    assert await alerts(books, 0) == []
    await price(books, PricedQuantity.TRAIN_TOKENS, "4", who=0, at=NOON + timedelta(minutes=30))
    assert await spent(books, 0) == Decimal("0.00004") == await cost(books, 0)
    assert [one.percent for one in await alerts(books, 0)] == [80]
    assert await spent(books, 1) == Decimal("0.00003") == await cost(books, 1)
    # A price of everybody changes nothing for a tenant with one of its own.
    await price(books, PricedQuantity.TRAIN_TOKENS, "1", base="tiny", at=NOON + timedelta(minutes=40))
    assert await spent(books, 0) == Decimal("0.00004") == await cost(books, 0)
    assert await spent(books, 1) == Decimal("0.000025") == await cost(books, 1)


async def test_a_price_for_very_many_budgets_takes_few_statements(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All work that ends meanwhile waits for them: 5,000 tenants, asked one by one, stood still for over half a minute."""
    many, at_once = 60, 25
    monkeypatch.setattr(price_additions, "_TENANTS_AT_ONCE", at_once)
    await price(books, PricedQuantity.TRAIN_TOKENS, "2", at=NOON - HOUR)
    async with books.database.write() as transaction:
        for number in range(many):
            books.tenants.append(await create_tenant(transaction, name=f"more-{number}", clock=lambda: NOON))
            books.sessions.append(SessionId(f"s{number}"))
    everybody = range(len(books.tenants))
    for who in everybody:
        await budget(books, who, "1", at=NOON - HOUR)
        await used(books, who, who + 1, at=NOON)
    await price(books, PricedQuantity.TRAIN_TOKENS, "7", who=0)
    statements: list[str] = []
    engine = books.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *told: statements.append(told[2]))
    await price(books, PricedQuantity.TRAIN_TOKENS, "4")
    assert len(statements) < many
    for who in everybody:
        expected = Decimal((who + 1) * (7 if who == 0 else 4)).scaleb(-6)
        assert await spent(books, who) == expected == await cost(books, who)


async def test_tokens_without_a_price_are_told_and_count_once_there_is_one(books: Books) -> None:
    await price(books, PricedQuantity.TRAIN_TOKENS, "2", base="tiny")
    await budget(books, 0, "10")
    await used(books, 0, 10)
    await used(books, 0, 1000, base="huge")
    assert [(one.spent, one.unpriced) for one in await stands(books, 0)] == [(Decimal("0.00002"), 1000)]
    await budget(books, 0, None)
    await budget(books, 0, "10")
    assert [(one.spent, one.unpriced) for one in await stands(books, 0)] == [(Decimal("0.00002"), 1000)]
    await price(books, PricedQuantity.TRAIN_TOKENS, "5", base="huge", at=NOON + timedelta(minutes=1))
    assert [(one.spent, one.unpriced) for one in await stands(books, 0)] == [(Decimal("0.00502"), 0)]
    assert await cost(books, 0) == Decimal("0.00502")


async def test_a_period_that_ends_begins_with_nothing_spent(books: Books) -> None:
    tomorrow = NOON + timedelta(hours=12)
    await price(books, PricedQuantity.TRAIN_TOKENS, "1000000")
    for period in Period:
        await budget(books, 0, "10", BudgetName(period, currency="USD"))
    await budget(books, 1, "10")
    await used(books, 0, 9)
    last = tomorrow - timedelta(microseconds=1)
    assert [one.spent for one in await stands(books, 0, at=last)] == [9, 9, 9]
    assert {one.name.period: one.spent for one in await stands(books, 0, at=tomorrow)} == {
        Period.DAY: 0,
        Period.MONTH: 9,
        Period.TOTAL: 9,
    }
    await used(books, 0, 2, at=tomorrow)
    found = {one.name.period: (one.spent, one.is_spent) for one in await stands(books, 0, at=tomorrow)}
    assert found == {Period.DAY: (2, False), Period.MONTH: (11, True), Period.TOTAL: (11, True)}
    told = sorted((one.name.period, one.percent) for one in await alerts(books, 0))
    assert told == [("day", 80), ("month", 80), ("month", 100), ("total", 80), ("total", 100)]
    assert await spent(books, 1, at=tomorrow) == 0


async def test_a_key_of_some_projects_is_told_their_alerts_whatever_others_crossed_since(books: Books) -> None:
    """Tell as many as are asked for, those of the tenant itself too, and none of another tenant."""
    await price(books, PricedQuantity.TRAIN_TOKENS, "1000000", at=NOON - HOUR)
    mine = []
    for who, tenant in enumerate(books.tenants):
        async with books.database.write() as transaction:
            made = [await create_project(transaction, tenant, name, lambda: NOON) for name in ("paper", "other")]
        mine.append(made[0].id)
        for number, one in enumerate(made):
            name = BudgetName(Period.DAY, project=one.id, currency="USD")
            at = NOON + timedelta(minutes=number)
            await move(books, who, one.id)
            await budget(books, who, "10", name, at=at)
            await used(books, who, 10, at=at)
    await budget(books, 0, "20", at=NOON + HOUR)
    async with books.database.read() as session:
        for who, tenant in enumerate(books.tenants):
            reach = Reach(tenant, frozenset({mine[who]}))
            newest = await alerts_of(session, reach, most=4)
            of_all = [(None, 100), (None, 80)] if who == 0 else []
            assert [(one.name.project, one.percent) for one in newest] == [*of_all, (mine[who], 100), (mine[who], 80)]
            assert len(await alerts_of(session, tenant)) == 4 + len(of_all)


async def test_another_amount_tells_of_no_mark_that_an_earlier_period_crossed(books: Books) -> None:
    """Sums of the running period tell, and to the tenant whose budget it is."""
    tomorrow = NOON + timedelta(hours=13)
    await price(books, PricedQuantity.TRAIN_TOKENS, "1000000")
    for who in (0, 1):
        await budget(books, who, "10")
    await used(books, 0, 10)
    earlier = await alerts(books, 0)
    assert sorted(one.percent for one in earlier) == [80, 100]
    await budget(books, 0, "9", at=tomorrow)
    assert await alerts(books, 0) == earlier
    await used(books, 0, 9, at=tomorrow)
    assert sorted((one.at, one.percent) for one in await alerts(books, 0))[2:] == [(tomorrow, 80), (tomorrow, 100)]
    assert await alerts(books, 1) == []


async def test_a_new_budget_of_a_key_counts_what_was_used_by_the_one_whose_place_it_took(books: Books) -> None:
    """Count it also once the earlier key has ended and its row is gone. Another tenant's key has a budget of its own."""
    async with books.database.write() as transaction:
        made = [await create_key(transaction, tenant=who, note="", clock=lambda: NOON) for who in books.tenants]
        row = await find_key(transaction, books.tenants[0], made[0].id)
        new = await rotate_key(transaction, row, grace=timedelta(), clock=lambda: NOON)
    for who, key in enumerate(made):
        await books.ended(who, NOON, tokens=30 + who, key_id=key.id)
    later = NOON + 2 * HOUR
    async with books.database.write() as transaction:
        assert await forget_ended_keys(transaction, later, ApiKey.tenant_id == books.tenants[0], most=5) == 1
    for who, key in enumerate((new, made[1])):
        await budget(books, who, "100", BudgetName(Period.DAY, key=key.id), at=later)
    assert (await spent(books, 0, at=later), await spent(books, 1, at=later)) == (30, 31)


async def test_budgets_in_tokens_and_in_money_stand_side_by_side(books: Books) -> None:
    await price(books, PricedQuantity.TRAIN_TOKENS, "3")
    await budget(books, 0, "5", DAY)
    await budget(books, 0, "100", BudgetName(Period.DAY))
    await used(books, 0, 7)
    found = {one.name.currency: (one.amount, one.spent) for one in await stands(books, 0)}
    assert found == {None: (100, 7), "USD": (5, Decimal("0.000021"))}


@pytest.mark.parametrize("amount", ["1e999999", "0", "-1", "0.0000001", "9007199254.740993", "NaN", "Infinity"])
async def test_an_amount_that_is_no_money_is_refused(books: Books, amount: str) -> None:
    await price(books, PricedQuantity.TRAIN_TOKENS, "3")
    with pytest.raises(InvalidRequest, match="a budget in money is above 0"):
        await budget(books, 0, amount)
    assert await stands(books, 0) == []


async def test_a_budget_without_prices_or_in_another_currency_than_theirs_is_refused(books: Books) -> None:
    with pytest.raises(InvalidRequest, match="there are no prices yet"):
        await budget(books, 0, "5")
    await price(books, PricedQuantity.TRAIN_TOKENS, "3", who=1)
    with pytest.raises(InvalidRequest, match="all prices are in USD"):
        await budget(books, 0, "5", BudgetName(Period.DAY, currency="EUR"))


async def test_a_tenants_own_price_goes_before_all_others_and_is_its_alone(books: Books) -> None:
    await price(books, PricedQuantity.TRAIN_TOKENS, "3")
    await price(books, PricedQuantity.TRAIN_TOKENS, "5", base="tiny")
    await price(books, PricedQuantity.TRAIN_TOKENS, "1", who=0)
    for who in (0, 1):
        await books.ended(who, NOON)
    assert [await cost(books, who) for who in (0, 1)] == [Decimal("0.00001"), Decimal("0.00005")]
    with pytest.raises(InvalidRequest, match="has a price"):
        await price(books, PricedQuantity.TRAIN_TOKENS, "2", who=0)
    await price(books, PricedQuantity.TRAIN_TOKENS, "0.5", who=0, base="tiny", at=NOON + HOUR)
    await books.ended(0, NOON + HOUR)
    assert await cost(books, 0) == Decimal("0.000015")
    window = {"since": NOON, "before": NOON + 2 * HOUR}
    exported = {
        who: [
            record.cost async for page in usage_records(books.database, books.tenants[who], **window) for record in page
        ]
        for who in (0, 1)
    }
    assert exported == {0: [Decimal("0.00001"), Decimal("0.000005")], 1: [Decimal("0.00005")]}
    async with books.database.read() as session:
        assert len((await tariff(session)).lines) == 2


async def test_an_own_prompt_price_is_also_that_of_cached_tokens_though_the_service_has_one(books: Books) -> None:
    await price(books, PricedQuantity.CACHED_PROMPT_TOKENS, "9")
    await price(books, PricedQuantity.SAMPLED_TOKENS, "0")
    await price(books, PricedQuantity.PROMPT_TOKENS, "1", who=0)
    await books.sampled(0, NOON)
    assert await cost(books, 0) == Decimal("0.000006")


async def test_a_projects_budget_keeps_what_was_spent_when_the_session_moves_away(books: Books) -> None:
    await price(books, PricedQuantity.TRAIN_TOKENS, "1000000")
    tenant = books.tenants[0]
    async with books.database.write() as transaction:
        made = await create_project(transaction, tenant, "paper", lambda: NOON)
    names = {project: BudgetName(Period.DAY, project=project, currency="USD") for project in (made.id, tenant)}
    for name in names.values():
        await budget(books, 0, "10", name)
    await budget(books, 1, "10", BudgetName(Period.DAY, project=books.tenants[1], currency="USD"))

    async def of_projects() -> dict[str | None, Decimal]:
        return {one.project_name: one.spent for one in await stands(books, 0)}

    await used(books, 0, 1)
    await move(books, 0, made.id)
    await used(books, 0, 3)
    assert await of_projects() == {"default": 1, "paper": 3}
    await move(books, 0, None)
    assert await of_projects() == {"default": 1, "paper": 3}
    # Set anew it counts what usage has of the project now.
    for name in names.values():
        await budget(books, 0, None, name)
        await budget(books, 0, "10", name)
    assert await of_projects() == {"default": 4, "paper": 0}
    async with books.database.read() as session:
        seen = await budgets_of(session, Reach(tenant, frozenset({made.id})), NOON)
    assert [one.project_name for one in seen] == ["paper"]
    assert await spent(books, 1) == 0
