"""A limit on a caller's statements ends a long one on either database, and no statement of anybody else."""

import asyncio
from time import monotonic

import pytest
from sqlalchemy import text

from contracts.errors import Unavailable
from store.database import Database, create_engine
from store.statement_limit import statements_within
from store.tables import Tenant

ENDLESS = {
    "sqlite": "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n",
    "postgresql": "SELECT pg_sleep(60)",
}
LIMIT, FAR_BELOW = 0.2, 20.0
RUNNING = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' "
    "AND query LIKE 'SELECT pg_sleep(60)%'"
)


async def test_a_statement_ends_at_its_callers_limit_and_the_next_one_runs(database_url: str) -> None:
    database = Database(create_engine(database_url))
    dialect = database.engine.dialect.name
    began = monotonic()
    with statements_within(LIMIT):
        with pytest.raises(Unavailable, match=r"longer than 0\.2 s"):
            async with database.read() as session:
                await session.execute(text(ENDLESS[dialect]))
        assert monotonic() - began < FAR_BELOW
    with statements_within(FAR_BELOW):
        async with database.read() as session:
            assert await session.scalar(text("SELECT 7")) == 7
            assert list(await session.scalars(Tenant.__table__.select())) == []
    if dialect == "postgresql":
        async with asyncio.timeout(FAR_BELOW), database.read() as session:
            while await session.scalar(RUNNING):
                await session.scalar(text("SELECT pg_sleep(0.05)"))
    await database.close()


async def test_a_limit_is_its_callers_own(database_url: str) -> None:
    """A caller without a limit runs a statement that takes longer, begun beside and after a limited one."""
    database = Database(create_engine(database_url))
    slow = {
        "sqlite": "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 500000) SELECT count(*) FROM n",
        "postgresql": "SELECT count(*) FROM (SELECT pg_sleep(0.1)) s",
    }[database.engine.dialect.name]

    async def read() -> object:
        async with database.read() as session:
            return await session.scalar(text(slow))

    async def limited() -> object:
        with statements_within(0.001):
            return await read()

    found = await asyncio.gather(limited(), read(), limited(), read(), return_exceptions=True)
    assert [isinstance(one, Unavailable) for one in found] == [True, False, True, False]
    assert await read() in (1, 500_000)
    async with database.write() as transaction:
        assert await transaction.scalar(text(slow)) in (1, 500_000)
    await database.close()
