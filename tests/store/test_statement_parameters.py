"""Text and numbers that a database cannot hold become text that it can, or a clear refusal; never a driver's error."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal

import pytest
import pytest_asyncio
from sqlalchemy import insert, select

from contracts.errors import InvalidRequest
from store.database import Database, create_engine
from store.tables import Price, Session, Tenant


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A database of each kind."""
    database = Database(create_engine(database_url))
    yield database
    await database.close()


async def test_text_that_no_database_holds_is_stored_without_what_it_cannot_hold(database: Database) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for number, name in enumerate(("a\0b", "c\ud800d", "caf\u00e9", "plain")):
        async with database.write() as transaction:
            transaction.add(Tenant(id=str(number), name=name, share=1.0, created_at=now))
            await transaction.flush()
            tenant = str(number)
            rows = [
                {"id": f"{number}-{place}", "tenant_id": tenant, "tags": [name], "created_at": now, "last_seen_at": now}
                for place in range(2)
            ]
            await transaction.execute(insert(Session), rows)
    async with database.read() as session:
        found = list(await session.scalars(select(Tenant.name).order_by(Tenant.id)))
        assert found == ["a\ufffdb", "c\ufffdd", "caf\u00e9", "plain"]
        assert await session.scalar(select(Tenant.id).where(Tenant.name == "no\0body")) is None


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**4000])
async def test_a_number_beyond_64_bits_is_refused(database: Database, number: int) -> None:
    async with database.read() as session:
        with pytest.raises(InvalidRequest, match="64 bits"):
            await session.scalar(select(Tenant.id).where(Tenant.share == 1.0).limit(1).offset(number))
        assert await session.scalar(select(Tenant.id)) is None


async def test_rows_that_one_statement_inserts_and_returns_are_cleaned_like_others(database: Database) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    price = {"base_model": "", "amount": Decimal(1), "currency": "USD", "valid_from": now, "created_at": now}
    async with database.write() as transaction:
        for meter in ("a\0b", "c"):
            transaction.add(Price(meter=meter, **price))
        await transaction.flush()
        returned = insert(Price).returning(Price.id)
        added = await transaction.execute(returned, [{"meter": meter, **price} for meter in ("d\ud800", "e")])
        assert len(added.all()) == 2
        assert set(await transaction.scalars(select(Price.meter))) == {"a\ufffdb", "c", "d\ufffd", "e"}
