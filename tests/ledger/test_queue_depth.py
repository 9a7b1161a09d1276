"""The queue's metrics: work that is held on purpose is counted apart, and its age raises no alarm."""

from datetime import timedelta
from decimal import Decimal

import pytest
from sqlalchemy import update

from contracts.ids import TenantId
from ledger.queue_depth import read_queue
from store.clock import utc_now
from store.tables import Budget, Operation
from telemetry.collectors import QueueState
from tenants.budget_settings import BudgetName, set_budget
from tenants.budgets import Period
from tenants.limits import set_tenant
from tenants.suspensions import resume_tenant, suspend_tenant
from tests.ledger.api_processes import BASE, Process, sample, tenant

HELD_BY = ["suspension", "budget", "rate", "gate"]


async def hold(one: Process, cats: TenantId, why: str) -> None:
    """Hold what the tenant sends from now on, or has sent."""
    async with one.database.write() as transaction:
        if why == "suspension":
            await suspend_tenant(transaction, name="cats", reason=None, now=utc_now())
        elif why == "budget":
            await set_budget(transaction, cats, BudgetName(Period.TOTAL), Decimal(1), utc_now())
            await transaction.execute(update(Budget).values(spent=1))
        elif why == "rate":
            limits = {"sample_tokens_per_minute": 1, "sample_tokens_burst": 1}
            await set_tenant(transaction, name="cats", limits=limits)
        else:
            held = update(Operation).where(Operation.tenant_id == cats).values(held_by="a run")
            await transaction.execute(held)


@pytest.mark.parametrize("why", HELD_BY)
async def test_held_work_raises_no_alarm_and_other_work_does(processes: list[Process], why: str) -> None:
    one = processes[0]
    cats, dogs = await tenant(processes, "cats"), await tenant(processes, "dogs")
    if why == "rate":
        await hold(one, cats, why)
    for seq_id in range(2):
        await one.samples.accept(sample(cats, seq_id, max_tokens=16))
    if why != "rate":
        await hold(one, cats, why)
    long_ago = utc_now() - timedelta(days=1)
    async with one.database.write() as transaction:
        await transaction.execute(update(Operation).values(created_at=long_ago))
    held = 1 if why == "rate" else 2
    (alone,) = await read_queue(one.database, utc_now)
    assert (alone.pending, alone.held) == (2, held)
    assert alone.oldest == (long_ago if why == "rate" else None)
    await one.samples.accept(sample(dogs, 0, max_tokens=16))
    (both,) = await read_queue(one.database, utc_now)
    assert (both.pending, both.held) == (3, held)
    assert both.oldest is not None


async def test_work_that_is_held_no_more_has_its_age_again(processes: list[Process]) -> None:
    one = processes[0]
    cats = await tenant(processes, "cats")
    await one.samples.accept(sample(cats, 0, max_tokens=16))
    await hold(one, cats, "suspension")
    async with one.database.write() as transaction:
        await resume_tenant(transaction, name="cats", now=utc_now())
    (found,) = await read_queue(one.database, utc_now)
    assert found == QueueState("sample", BASE, 1, 0, found.oldest)
    assert found.oldest is not None
