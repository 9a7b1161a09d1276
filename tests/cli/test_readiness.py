"""Readiness: the checks of the database that every process makes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psycopg
import pytest

from cli.readiness import readiness
from migrations.upgrade import downgrade
from store.database import Database, create_engine

Look = Callable[[str], Awaitable[str]]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    database = Database(create_engine(url))
    try:
        yield database
    finally:
        await database.close()


@pytest.fixture
def look() -> Look:
    """Return a function that reports a starting process's readiness of the database at a URL."""

    async def looked(url: str) -> str:
        async with opened(url) as database:
            found = readiness(database, ["org/name"])
            found.seconds = 60.0
            return (await found.look()).parts["database"]

    return looked


async def test_a_database_with_the_newest_schema_is_ready(look: Look, database_url: str) -> None:
    assert await look(database_url) == "ok"


async def test_a_database_that_only_reads_is_not(look: Look, migrated_postgres_url: str) -> None:
    with psycopg.connect(migrated_postgres_url.replace("+asyncpg", ""), autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'.encode())
        assert await look(migrated_postgres_url) == "the database is set to read only"
        connection.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only'.encode())
        assert await look(migrated_postgres_url) == "ok"


async def test_a_schema_that_is_behind_is_not(look: Look, migrated_postgres_url: str) -> None:
    downgrade(migrated_postgres_url, "0006")
    assert "weft db upgrade" in await look(migrated_postgres_url)
