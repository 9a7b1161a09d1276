"""Verification finds what was added up wrongly, and finds nothing where all is right."""

from datetime import timedelta

import pytest
from sqlalchemy import delete, update

from store.tables import Operation, UsageDay, UsageHour
from tenants.usage_hours import forget_usage
from tenants.usage_verification import Verification, verify_day
from tests.tenants.usage_books import NOON, Books

DAY = timedelta(days=1)


async def verified(books: Books, *, kept_since=NOON - DAY, hours_since=NOON - DAY) -> Verification:
    async with books.database.read() as session:
        return await verify_day(session, NOON.date(), kept_since=kept_since, hours_since=hours_since)


async def filled(books: Books) -> None:
    for minutes in (0, 59, 61):
        await books.ended(0, NOON + timedelta(minutes=minutes))
        await books.sampled(1, NOON + timedelta(minutes=minutes))


async def test_right_sums_are_right_before_and_after_pruning(books: Books) -> None:
    await filled(books)
    for until in (NOON, NOON + timedelta(minutes=60), NOON + DAY):
        await books.prune(until)
        assert (await verified(books)).mismatches == []
    found = await verified(books)
    assert (found.tenants, found.operations) == (2, 6)


async def test_a_sum_that_is_off_by_one_is_told_with_its_tenant_and_no_other(books: Books) -> None:
    await filled(books)
    await books.prune(NOON + DAY)
    async with books.database.write() as transaction:
        await transaction.execute(
            update(UsageHour)
            .where(UsageHour.tenant_id == books.tenants[0], UsageHour.hour == NOON)
            .values(train_tokens=UsageHour.train_tokens + 1)
        )
    told = {(one.tenant, one.table, one.name, one.told - one.counted) for one in (await verified(books)).mismatches}
    assert told == {("cats", "usage_hours", "train_tokens", 1), ("cats", "usage_days", "tokens", -1)}


async def test_a_day_that_differs_from_its_hours_is_told(books: Books) -> None:
    await filled(books)
    await books.prune(NOON + DAY)
    async with books.database.write() as transaction:
        await transaction.execute(delete(UsageDay).where(UsageDay.tenant_id == books.tenants[1]))
    told = {(one.tenant, one.table, one.name, one.told) for one in (await verified(books)).mismatches}
    assert told == {("dogs", "usage_days", "operations", 0), ("dogs", "usage_days", "tokens", 0)}


async def test_hours_whose_operations_are_forgotten_are_not_counted_again(books: Books) -> None:
    await filled(books)
    await books.prune(NOON + DAY)
    async with books.database.write() as transaction:
        await transaction.execute(delete(Operation).where(Operation.finished_at < NOON + timedelta(hours=1)))
    found = await verified(books, kept_since=NOON + timedelta(minutes=30))
    assert (found.mismatches, found.since, found.operations) == ([], NOON + timedelta(hours=1), 2)
    assert (await verified(books)).mismatches


@pytest.mark.parametrize("is_kept", [False, True], ids=["operations forgotten", "operations kept"])
async def test_a_day_outlives_its_hours_and_is_told_as_not_compared(books: Books, is_kept: bool) -> None:
    await filled(books)
    await books.prune(NOON + DAY)
    expired = NOON + timedelta(minutes=30)
    async with books.database.write() as transaction:
        await forget_usage(transaction, before=expired, most=100)
    found = await verified(books, kept_since=NOON - DAY if is_kept else expired, hours_since=expired)
    assert (found.mismatches, found.has_all_hours, found.since) == ([], False, NOON + timedelta(hours=1))
    assert (await verified(books)).mismatches
