"""Rows of a newer version do not break what an older process does for anybody else, on both databases."""

from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal

import pytest_asyncio
from sqlalchemy import insert, select, update

from contracts.ids import RunId
from contracts.operations import LoraSettings
from contracts.weight_jobs import MergeRequest
from store.tables import Budget, DirectedRun, Price, Rate, RateLineRow, Run, WeightJob
from tenants.budget_settings import BudgetName, alerts_of, budgets_of, set_budget
from tenants.budgets import Period, first_spent
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity, tariff, tariffs
from tenants.project_limits import spent_and_limits
from tenants.rate_lines import line_states_of_tenant
from tenants.rates import Meter, Pace, charge, rate_states
from tenants.run_directives import RunDirective, direct_run, directives_for, standing_directive
from tenants.runs import NewRun
from tenants.spending import Spender, Spending, spend
from tenants.taken_jobs import take_job
from tenants.weight_jobs import add_merge
from testing.runs import create_run
from tests.tenants.usage_books import NOON, Books

TRAINER = "trainer-1"
TOTAL = BudgetName(Period.TOTAL)


@pytest_asyncio.fixture
async def runs(books: Books) -> AsyncIterator[list[RunId]]:
    """A run of each tenant, which the same trainer leases."""
    async with books.database.write() as transaction:
        made = [
            await create_run(
                transaction, tenant, NewRun(session, 0, "tiny", LoraSettings(rank=8, seed=1), None), lambda: NOON
            )
            for tenant, session in zip(books.tenants, books.sessions, strict=True)
        ]
        await transaction.execute(update(Run).values(trainer_id=TRAINER))
    yield made


async def train(books: Books, tokens: int) -> None:
    """End a pass of both tenants, in one transaction, as a trainer does."""
    used = [
        Spending(Spender(tenant, None, session), "tiny", NOON, {PricedQuantity.TRAIN_TOKENS: tokens})
        for tenant, session in zip(books.tenants, books.sessions, strict=True)
    ]
    async with books.database.write() as transaction:
        await spend(transaction, used, NOON)


async def test_a_budget_of_a_newer_versions_period_is_charged_and_holds_and_so_is_the_other_tenants(
    books: Books,
) -> None:
    """The newer version alone begins its period anew, so nothing that is spent is forgotten."""
    cats, dogs = books.tenants
    async with books.database.write() as transaction:
        for tenant in books.tenants:
            await set_budget(transaction, tenant, TOTAL, 100, NOON)
        week = {"period": "week", "resets_at": NOON + timedelta(days=3)}
        await transaction.execute(update(Budget).where(Budget.tenant_id == cats).values(week))
    await train(books, 90)
    async with books.database.read() as session:
        rows = {row.tenant_id: row for row in await session.scalars(select(Budget))}
        assert (await budgets_of(session, cats, NOON), await alerts_of(session, cats)) == ([], [])
        (standing,), (alert,) = await budgets_of(session, dogs, NOON), await alerts_of(session, dogs)
    assert [rows[tenant].spent for tenant in (cats, dogs)] == [90, 90]
    assert (standing.spent, alert.percent) == (Decimal(90), 80)
    await train(books, 10)
    async with books.database.read() as session:
        found, _ = await spent_and_limits(session, cats, None, NOON)
    spent = first_spent(found, None, cats)
    assert spent is not None
    assert "budget of the week" in spent.told(NOON)
    assert spent.ends(NOON) is None
    async with books.database.write() as transaction:
        await transaction.execute(update(Budget).where(Budget.tenant_id == cats).values(resets_at=NOON))
    await train(books, 5)
    async with books.database.read() as session:
        rows = {row.tenant_id: row for row in await session.scalars(select(Budget))}
    assert [rows[tenant].spent for tenant in (cats, dogs)] == [105, 105]


async def test_a_directive_of_a_newer_version_is_left_to_it_and_others_are_carried_out(
    books: Books, runs: list[RunId]
) -> None:
    async with books.database.write() as transaction:
        for run in runs:
            await direct_run(transaction, run, RunDirective.EVICT, now=NOON)
        await transaction.execute(update(DirectedRun).where(DirectedRun.run_id == runs[0]).values(wanted="pin"))
    async with books.database.read() as session:
        found = await directives_for(session, TRAINER)
        assert await standing_directive(session, runs[0]) is None
    assert [(one.run, one.directive) for one in found] == [(runs[1], RunDirective.EVICT)]


async def test_a_job_of_a_newer_version_is_left_to_its_workers_and_the_other_tenants_is_taken(
    books: Books, runs: list[RunId]
) -> None:
    async with books.database.write() as transaction:
        jobs = [
            await add_merge(transaction, tenant, "tiny", MergeRequest(f"tinker://{run}/weights/kept", "merged"), NOON)
            for tenant, run in zip(books.tenants, runs, strict=True)
        ]
        await transaction.execute(update(WeightJob).where(WeightJob.id == jobs[0].id).values(kind="distil"))
    async with books.database.write() as transaction:
        taken = [await take_job(transaction, ["tiny"], NOON) for _ in range(2)]
    assert [None if one is None else one.id for one in taken] == [jobs[1].id, None]


async def test_a_price_of_a_newer_versions_meter_costs_nothing_here_and_others_cost_as_before(books: Books) -> None:
    cats, dogs = books.tenants
    async with books.database.write() as transaction:
        await add_price(transaction, NewPrice(PricedQuantity.TRAIN_TOKENS, "2", "USD"), lambda: NOON)
        other = {"base_model": "", "meter": "audio_seconds", "amount": Decimal(7), "currency": "USD"}
        await transaction.execute(insert(Price).values(**other, valid_from=NOON, created_at=NOON))
    async with books.database.read() as session:
        found = [await tariff(session, cats), *(await tariffs(session, [cats, dogs], ["tiny"])).values()]
    assert [[line.meter for line in one.lines] for one in found] == [[PricedQuantity.TRAIN_TOKENS]] * 3
    assert {one.cost(PricedQuantity.TRAIN_TOKENS, 10**6, "tiny", NOON) for one in found} == {Decimal(2)}


async def test_a_rate_of_a_newer_versions_meter_is_left_out_and_others_stand(books: Books) -> None:
    cats, dogs = books.tenants
    row = {"tat": 0.0, "per_second": 1.0, "burst": 1, "charged": 0, "returned": 0}
    async with books.database.write() as transaction:
        for tenant in books.tenants:
            await charge(transaction, tenant, Meter.TRAIN, Pace(1.0, 10), cost=5, now=NOON)
        await transaction.execute(insert(Rate).values(tenant_id=cats, meter="images", **row))
        lines = [("key", "images"), ("team", "train"), ("key", "train")]
        new = [{"tenant_id": cats, "scope": scope, "scope_id": "1", "meter": meter, **row} for scope, meter in lines]
        await transaction.execute(insert(RateLineRow), new)
    async with books.database.read() as session:
        assert {*await rate_states(session, [cats, dogs])} == {(cats, Meter.TRAIN), (dogs, Meter.TRAIN)}
        assert [(one.scope, one.meter) for one in await line_states_of_tenant(session, cats)] == [("key", "train")]
