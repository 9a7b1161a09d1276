"""Budgets in money are exact while several processes end work at once, repeat it, die, and a price is added meanwhile."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import numpy as np
import pytest
from sqlalchemy import update

from contracts.ids import TenantId
from contracts.ledger_records import Completion, NewOperation, ReadyOperation
from contracts.operations import SampledSequence, SampleOutput
from ledger.sample_claims import waiting_samples
from store.clock import utc_now
from store.tables import Session
from tenants.budget_settings import BudgetName, BudgetStanding, alerts_of, budgets_of, set_budget
from tenants.budgets import Period
from tenants.limits import set_tenant
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity
from tenants.projects import create_project
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import NewSession, create_session
from tenants.usage_costs import priced
from tenants.usage_hours import BucketWidth, usage_lines
from tests.ledger.api_processes import BASE, PROCESSES, Process, sample, tenant
from tests.ledger_heads import pending_samples

PROMPT, CACHED, DRAWN = 4, 3, 10
DOLLARS = BudgetName(Period.TOTAL, currency="USD")
DRAWN_TOKENS = SampledSequence("stop", np.zeros(DRAWN, np.int32), np.zeros(DRAWN, np.float32))
DONE = SampleOutput([DRAWN_TOKENS], prompt_cache_hit_tokens=CACHED)
RATES = {
    PricedQuantity.PROMPT_TOKENS: "700000",
    PricedQuantity.CACHED_PROMPT_TOKENS: "70000",
    PricedQuantity.SAMPLED_TOKENS: "1300000",
}
COST = Decimal("0.7") + 3 * Decimal("0.07") + 10 * Decimal("1.3")
"""Cost of a sample."""


def asked(owner: TenantId, seq_id: int) -> NewOperation:
    """A sample of four tokens that may draw sixteen."""
    return replace(sample(owner, seq_id, max_tokens=16), tokens=PROMPT)


async def add_prices(one: Process, rates: dict[PricedQuantity, str], **more: object) -> None:
    async with one.database.write() as transaction:
        for meter, amount in rates.items():
            await add_price(transaction, NewPrice(meter, amount, "USD", **more), utc_now)  # type: ignore[arg-type]


async def give(one: Process, owner: TenantId, amount: Decimal, name: BudgetName = DOLLARS) -> None:
    async with one.database.write() as transaction:
        await set_budget(transaction, owner, name, amount, utc_now())


async def accepted(processes: Sequence[Process], owner: TenantId, number: int) -> list[ReadyOperation]:
    """Samples of the tenant that wait."""
    one = processes[0]
    async with one.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"pending_samples": None})
    for seq_id in range(number):
        await one.samples.accept(asked(owner, seq_id))
    async with one.database.read() as session:
        return [op for op in await pending_samples(one.ledger, session, BASE) if op.tenant == owner]


async def complete(one: Process, ready: Sequence[ReadyOperation]) -> None:
    async with one.database.write() as transaction:
        await one.ledger.complete(transaction, [Completion(op, DONE) for op in ready])


async def stands(one: Process, owner: TenantId) -> BudgetStanding:
    async with one.database.read() as session:
        (found,) = await budgets_of(session, owner, utc_now())
    return found


async def cost(one: Process, owner: TenantId) -> Decimal | None:
    """Return the cost of all of the tenant's work by its usage."""
    window = {"since": datetime(2020, 1, 1, tzinfo=UTC), "before": utc_now() + timedelta(days=1)}
    async with one.database.read() as session:
        lines = await usage_lines(session, owner, **window, by=(), width=BucketWidth.DAY, limit=10)
        _, found = await priced(session, owner, lines, **window, by=(), width=BucketWidth.DAY)
    return sum((line.cost or Decimal(0) for line in found), Decimal(0))


async def test_work_that_processes_end_at_once_and_again_is_charged_once_to_the_last_digit(
    processes: list[Process],
) -> None:
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    await add_prices(processes[0], RATES)
    for owner in (cats, dogs):
        await give(processes[0], owner, 10 * COST)
    ready, theirs = await accepted(processes, cats, 12), await accepted(processes, dogs, 1)
    # Each is ended twice, as by a process whose answer was lost.
    ended = random.sample([*ready[:10], *ready[:10]], 20)
    await complete(processes[0], [*theirs, ready[0]])
    await asyncio.gather(*(complete(processes[place % PROCESSES], [op]) for place, op in enumerate(ended)))
    found = await stands(processes[0], cats)
    assert (found.spent, found.unpriced, found.is_spent) == (10 * COST, 0, True)
    assert found.spent == await cost(processes[0], cats)
    async with processes[0].database.read() as session:
        assert sorted(alert.percent for alert in await alerts_of(session, cats)) == [80, 100]
        waiting = (await waiting_samples(session, BASE, of_each=30, now=utc_now())).of
        assert not waiting.get(cats)
    assert (await stands(processes[0], dogs)).spent == COST == await cost(processes[0], dogs)
    await give(processes[1], cats, 11 * COST)
    async with processes[2].database.read() as session:
        assert len((await waiting_samples(session, BASE, of_each=30, now=utc_now())).of[cats]) == 2


async def test_the_last_operation_before_the_amount_does_not_hold_the_rest(processes: list[Process]) -> None:
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    await add_prices(processes[0], RATES)
    # A millionth of a dollar more than three cost.
    await give(processes[0], cats, 3 * COST + Decimal("0.000001"))
    ready = await accepted(processes, cats, 5)
    for number, op in enumerate(ready[:4], start=1):
        async with processes[1].database.read() as session:
            assert cats in (await waiting_samples(session, BASE, of_each=30, now=utc_now())).of
        await complete(processes[number % PROCESSES], [op])
    async with processes[1].database.read() as session:
        assert not (await waiting_samples(session, BASE, of_each=30, now=utc_now())).of.get(cats)
        assert await budgets_of(session, dogs, utc_now()) == []


async def test_a_process_that_dies_before_its_commit_has_charged_nothing(processes: list[Process]) -> None:
    cats = await tenant(processes, "cats")
    await add_prices(processes[0], RATES)
    await give(processes[0], cats, 100 * COST)
    (ready,) = await accepted(processes, cats, 1)

    async def die() -> None:
        async with processes[1].database.write() as transaction:
            await processes[1].ledger.complete(transaction, [Completion(ready, DONE)])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await die()
    assert (await stands(processes[0], cats)).spent == 0
    await complete(processes[2], [ready])
    assert (await stands(processes[0], cats)).spent == COST == await cost(processes[0], cats)


async def test_a_price_that_is_added_while_work_ends_leaves_the_budget_equal_to_the_bill(
    processes: list[Process],
) -> None:
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    await add_prices(processes[0], RATES)
    for owner in (cats, dogs):
        await give(processes[0], owner, 1000 * COST)
    ready = await accepted(processes, cats, 30)

    async def dearer() -> None:
        await add_prices(processes[0], {PricedQuantity.SAMPLED_TOKENS: "7700000.0000000001"}, tenant=cats)
        await add_prices(processes[1], {PricedQuantity.PROMPT_TOKENS: "900000"}, base_model=BASE)

    await asyncio.gather(
        *(complete(processes[place % PROCESSES], [op]) for place, op in enumerate(ready[:15])),
        dearer(),
        *(complete(processes[place % PROCESSES], [op]) for place, op in enumerate(ready[15:])),
    )
    each = Decimal("0.9") + 3 * Decimal("0.07") + 10 * Decimal("7.7000000000000001")
    assert (await stands(processes[0], cats)).spent == 30 * each == await cost(processes[0], cats)
    assert (await stands(processes[0], dogs)).spent == 0


async def test_a_spent_project_holds_its_samples_wherever_they_were_accepted_and_no_others(
    processes: list[Process],
) -> None:
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    one = processes[0]
    await add_prices(one, RATES)
    lanes = []
    async with one.database.write() as transaction:
        project = await create_project(transaction, cats, "paper", utc_now)
        for place in (project.id, None):
            session = await create_session(transaction, cats, NewSession([], None, "", place, None), utc_now)
            lanes.append(
                await create_sampler(transaction, cats, NewSampler(session, 0, BASE, None, None, None), utc_now)
            )
    await give(one, cats, COST, BudgetName(Period.DAY, project=project.id, currency="USD"))
    async with one.database.write() as transaction:
        for lane in lanes:
            for seq_id in range(3):
                await one.ledger.accept(transaction, replace(asked(cats, seq_id), lane=lane))
        await one.ledger.accept(transaction, asked(dogs, 0))

    async def waiting() -> dict[str, int]:
        async with processes[2].database.read() as session:
            found = (await waiting_samples(session, BASE, of_each=30, now=utc_now())).of
        return {
            lane: sum(op.lane == lane for ops in found.values() for op in ops) for lane in (*lanes, f"{dogs}:sample:0")
        }

    async with one.database.read() as session:
        ready = await pending_samples(one.ledger, session, BASE)
    await complete(processes[1], [next(op for op in ready if op.lane == lanes[0])])
    assert list((await waiting()).values()) == [0, 3, 1]
    # Work follows its session: in another project it goes on.
    async with one.database.write() as transaction:
        moved = update(Session).where(Session.id == lanes[0].partition(":")[0]).values(project=None)
        await transaction.execute(moved)
    assert list((await waiting()).values()) == [2, 3, 1]
