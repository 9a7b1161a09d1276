"""Samples that fail after some tokens: rates, budgets, usage and its verification agree on what counts; both databases."""

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from sqlalchemy import select, update

from contracts.errors import EngineFailure, NotFound, StaleSample
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import Completion, NewOperation
from contracts.operations import OperationKind, SampledSequence, SampleOutput, SampleRequest, SamplingParams
from contracts.sample_demand import demand_of
from contracts.sample_progress import SampleProgress
from contracts.sample_report import SampleReport, SequenceReport, VersionSpan
from ledger.cancellation import OfTenant
from ledger.pruning import prune
from ledger.sample_intake import SampleIntake
from store.clock import utc_now
from store.settings import Settings
from store.tables import Operation, Rate
from telemetry.telemetry import Telemetry
from tenants.budget_settings import BudgetName, budgets_of, set_budget
from tenants.budgets import Period
from tenants.limits import Limits, set_tenant
from tenants.sample_progress import save_progress
from tenants.usage import tokens_since
from tenants.usage_hours import UsageLine, usage_lines
from tenants.usage_verification import verify_day
from tests.ledger.test_cancellation import BASE, Owner, Two
from tests.ledger.test_cancellation import two as two
from tests.payloads import digest, stored

PROMPT, CACHED, DRAWN, RESERVED = 3, 2, 10, 103
DAY = timedelta(days=1)
SAVED = SampleProgress(
    SampleOutput(
        [SampledSequence("length", np.full(DRAWN, 7, np.int32), np.zeros(DRAWN, np.float32))],
        prompt_cache_hit_tokens=CACHED,
    ),
    SampleReport([SequenceReport("", [VersionSpan(None, 0, DRAWN)])], ["replica"], 1, 0.0, 0.0),
)


async def accepted(two: Two, owner: Owner) -> RequestId:
    """A sample of a tenant with a rate and a budget, which may draw a hundred tokens."""
    async with two.database.write() as transaction:
        name = "cat" if owner is two.cat else "dog"
        await set_tenant(transaction, name=name, limits={"sample_tokens_per_minute": 6000})
        await set_budget(transaction, owner.tenant, BudgetName(Period.TOTAL), 10**6, utc_now())
    request = SampleRequest(np.array([1, 2, 3]), params=SamplingParams(max_tokens=RESERVED - PROMPT))
    new = NewOperation(
        owner.tenant, owner.sampler, 1, OperationKind.SAMPLE, BASE, stored(request), digest(request), tokens=PROMPT
    )
    defaults = Limits.of(Settings())
    intake = SampleIntake(two.database, two.ledger, utc_now, Telemetry.of("test", utc_now), defaults=defaults)
    await intake.accept(replace(new, demand=demand_of(request, 128)))
    return new.id


async def end(two: Two, mine: RequestId, theirs: RequestId, how: str) -> None:
    """End the cat's sample after some tokens, twice as where an answer was lost, and the dog's as the service's failure."""
    async with two.database.read() as session:
        operations = {one.id: one for one in await two.ledger.load(session, [mine, theirs])}
    ends = [Completion(operations[theirs], EngineFailure("the device is gone"))]
    if how == "between two processes":
        async with two.database.write() as transaction:
            await save_progress(transaction, [(two.cat.tenant, mine, SAVED)])
    elif how == "cancelled as it fails":
        async with two.database.write() as transaction:
            await transaction.execute(update(Operation).where(Operation.id == mine).values(taken_by="a pool"))
    else:
        error = {"stale": StaleSample("too old"), "its checkpoint gone": NotFound("deleted")}[how]
        ends.append(Completion(operations[mine], error, DRAWN, CACHED))
    if how in ("between two processes", "cancelled as it fails"):
        await two.cancel(OfTenant(two.cat.tenant))
    if how == "cancelled as it fails":
        ends.append(Completion(operations[mine], StaleSample("too old"), DRAWN, CACHED))
    for _ in range(2):
        async with two.database.write() as transaction:
            await two.ledger.complete(transaction, ends)


async def charged(two: Two, tenant: TenantId) -> int:
    async with two.database.read() as session:
        (rate,) = await session.scalars(select(Rate).where(Rate.tenant_id == tenant))
    return rate.charged - rate.returned


@pytest.mark.parametrize("how", ["stale", "its checkpoint gone", "cancelled as it fails", "between two processes"])
async def test_tokens_of_a_sample_that_its_tenant_has_fail_count_everywhere(two: Two, how: str) -> None:
    """A neighbour's sample that the service fails counts nowhere."""
    mine, theirs = await accepted(two, two.cat), await accepted(two, two.dog)
    assert [await charged(two, one.tenant) for one in (two.cat, two.dog)] == [RESERVED, RESERVED]
    await end(two, mine, theirs, how)
    assert [await charged(two, one.tenant) for one in (two.cat, two.dog)] == [PROMPT + DRAWN, 0]
    for _ in range(2):
        lines: list[UsageLine] = []
        now = utc_now()
        async with two.database.read() as session:
            for one, used in ((two.cat, PROMPT + DRAWN), (two.dog, 0)):
                (budget,) = await budgets_of(session, one.tenant, now)
                assert (budget.spent, await tokens_since(session, one.tenant, now - DAY)) == (used, used)
                lines += await usage_lines(session, one.tenant, since=now - DAY, before=now + DAY, by=(), limit=9)
            days = [now.date() - DAY, now.date()]
            found = [
                await verify_day(session, day, kept_since=now - 3 * DAY, hours_since=now - 3 * DAY) for day in days
            ]
        assert [one.mismatches for one in found] == [[], []]
        sums = [(one.failed, one.prompt_tokens, one.cached_prompt_tokens, one.sampled_tokens) for one in lines]
        assert sums == [(1, PROMPT, CACHED, DRAWN), (1, 0, 0, 0)]
        async with two.database.write() as transaction:
            await prune(transaction, finished_before=now + DAY, now=now)


async def test_saved_tokens_of_a_sample_that_a_process_draws_on_are_counted_by_that_process(two: Two) -> None:
    """The process has drawn more of them by then."""
    mine = await accepted(two, two.cat)
    async with two.database.write() as transaction:
        await save_progress(transaction, [(two.cat.tenant, mine, SAVED)])
        await transaction.execute(update(Operation).where(Operation.id == mine).values(taken_by="a pool"))
        (operation,) = await two.ledger.load(transaction, [mine])
    await two.cancel(OfTenant(two.cat.tenant))
    more = SampledSequence("length", np.full(4 * DRAWN, 7, np.int32), np.zeros(4 * DRAWN, np.float32))
    async with two.database.write() as transaction:
        await two.ledger.complete(transaction, [Completion(operation, SampleOutput([more]))])
    async with two.database.read() as session:
        assert await tokens_since(session, two.cat.tenant, utc_now() - DAY) == PROMPT + 4 * DRAWN
