"""Usage counts each operation once, however often and by how many processes it is pruned."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest_asyncio
from sqlalchemy import insert

from contracts.ledger_records import OperationState
from ledger.pruning import prune
from store.database import Database, create_engine
from store.tables import Operation
from tenants.tenant_names import create_tenant
from tenants.usage import usage

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
    assert [(line.tenant, line.day.day, line.operations, line.tokens) for line in before] == [
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
