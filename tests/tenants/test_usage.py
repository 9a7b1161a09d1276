"""Usage counts each operation once, however often and by how many processes it is pruned."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta

import pytest_asyncio
from sqlalchemy import insert, select

from contracts.ledger_records import OperationState
from ledger.pruning import prune
from store.database import Database, create_engine
from store.tables import Operation, Tenant
from tenants.tenant_names import create_tenant
from tenants.usage import DayLine, usage

NOW = datetime(2030, 1, 2, 12, tzinfo=UTC)


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Two tenants with ten finished operations each, five a day, and one that failed."""
    made = Database(create_engine(database_url))
    async with made.write() as transaction:
        for name in ("cats", "dogs"):
            tenant = await create_tenant(transaction, name=name, clock=lambda: NOW)
            rows = [_row(tenant, name, number) for number in range(11)]
            await transaction.execute(insert(Operation), rows)
    yield made
    await made.close()


def _row(tenant: str, name: str, number: int) -> dict[str, object]:
    state = OperationState.FAILED if number == 10 else OperationState.DONE
    return {
        "id": f"{name}-{number}",
        "tenant_id": tenant,
        "lane": name,
        "seq_id": number,
        "kind": "forward_backward",
        "base_model": "tiny",
        "state": state,
        "body_digest": b"",
        "tokens": 10 + number,
        "created_at": NOW,
        "finished_at": NOW - timedelta(days=number % 2),
    }


async def test_usage_is_the_same_before_and_after_pruning_and_pruning_again(database: Database) -> None:
    async with database.read() as session:
        before = await usage(session, since=NOW.date() - timedelta(days=1))
    assert sorted((line.tenant, line.day.day, line.operations, line.tokens) for line in before) == [
        ("cats", 1, 5, 75),
        ("cats", 2, 5, 70),
        ("dogs", 1, 5, 75),
        ("dogs", 2, 5, 70),
    ]

    async def sweep() -> None:
        async with database.write() as transaction:
            await prune(transaction, finished_before=NOW - timedelta(hours=1), now=NOW)

    # Concurrent sweeps, as a doubled message causes them; then the rest of the day.
    await asyncio.gather(*(sweep() for _ in range(4)))
    async with database.read() as session:
        assert await usage(session, since=NOW.date() - timedelta(days=1)) == before
    async with database.write() as transaction:
        await prune(transaction, finished_before=NOW + timedelta(hours=1), now=NOW)
    async with database.read() as session:
        assert await usage(session, since=NOW.date() - timedelta(days=1)) == before
        assert [line.day.day for line in await usage(session, since=NOW.date())] == [2, 2]


async def test_pages_tell_each_line_once_while_operations_are_pruned_between_them(database: Database) -> None:
    """The lines are those of one answer, in its order, with the same sums; those of one tenant have no other's."""
    since = NOW.date() - timedelta(days=1)
    async with database.write() as transaction:
        more = [_row(tenant, f"{tenant[:20]}-more", 12) for tenant in await transaction.scalars(select(Tenant.id))]
        await transaction.execute(insert(Operation), [one | {"kind": "sample", "base_model": "big"} for one in more])
    async with database.read() as session:
        whole = await usage(session, since=since)
        of_dogs = await usage(session, since=since, tenant="dogs")
    assert [line.tenant for line in of_dogs] == ["dogs"] * 3
    assert sorted(of_dogs, key=whole.index) == [line for line in whole if line.tenant == "dogs"]
    for which, expected in ((None, whole), ("dogs", of_dogs)):
        found: list[DayLine] = []
        while page := await _page(database, since, which, found[-1] if found else None):
            found += page
            async with database.write() as transaction:
                await prune(transaction, finished_before=NOW - timedelta(hours=23 - len(found)), now=NOW)
        assert found == expected
        assert len(found) > 2


async def _page(database: Database, since: date, tenant: str | None, after: DayLine | None) -> list[DayLine]:
    async with database.read() as session:
        page = await usage(session, since=since, tenant=tenant, after=after, most=2)
    assert len(page) <= 2
    return page
