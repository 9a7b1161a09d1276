"""Transactions hold whatever their statements are over, mapped objects or tables, and whoever reads meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from sqlalchemy import Connection, event, func, insert, make_url, select

from contracts.errors import Unavailable
from store.database import Database, after_commit, create_engine, undo
from store.tables import Tenant

_TENANTS = Tenant.__table__
_NAMES = select(_TENANTS.c.name).order_by(_TENANTS.c.name)
_NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A database of each kind."""
    database = Database(create_engine(database_url))
    yield database
    await database.close()


def _row(name: str) -> dict[str, object]:
    return {"id": name, "name": name, "share": 1.0, "created_at": _NOW}


async def _names(database: Database) -> list[str]:
    async with database.read() as session:
        over_tables = list(await session.scalars(_NAMES))
        assert list(await session.scalars(select(Tenant.name).order_by(Tenant.name))) == over_tables
    return over_tables


async def test_objects_and_rows_of_one_transaction_are_committed_or_undone_together(database: Database) -> None:
    for objects_first in (True, False):
        for name in ("kept", "undone", "failed"):
            told: list[str] = []
            with pytest.raises(ZeroDivisionError) if name == "failed" else nullcontext():
                async with database.write() as transaction:
                    after_commit(transaction, lambda told=told: told.append("committed"))
                    if objects_first:
                        transaction.add(Tenant(**_row(f"{name} object first")))
                        await transaction.flush()
                    await transaction.execute(insert(_TENANTS), [_row(f"{name} row {objects_first}")])
                    if not objects_first:
                        transaction.add(Tenant(**_row(f"{name} object last")))
                    if name == "undone":
                        await undo(transaction)
                    if name == "failed":
                        raise ZeroDivisionError
            assert told == (["committed"] if name == "kept" else [])
    assert await _names(database) == ["kept object first", "kept object last", "kept row False", "kept row True"]


async def test_a_reader_sees_what_is_committed_and_no_more(database: Database) -> None:
    async with database.read() as session:
        assert list(await session.scalars(_NAMES)) == []
        async with database.write() as transaction:
            await transaction.execute(insert(_TENANTS), _row("new"))
            assert list(await session.scalars(_NAMES)) == []
            assert await session.scalar(select(func.count()).select_from(Tenant)) == 0
        assert list(await session.scalars(_NAMES)) == ["new"]
        assert (await session.scalars(select(Tenant))).one().name == "new"


async def test_a_half_read_result_holds_nobody_up_and_keeps_its_rows(database: Database) -> None:
    async with database.write() as transaction:
        await transaction.execute(insert(_TENANTS), [_row("a"), _row("b"), _row("c")])
    async with database.read() as session:
        rows = await session.execute(_NAMES)
        assert rows.fetchone() == ("a",)
        async with database.write() as transaction:
            await transaction.execute(_TENANTS.delete().where(_TENANTS.c.name == "b"))
        assert list(await session.scalars(_NAMES)) == ["a", "c"]
        assert rows.fetchmany(1) == [("b",)]
        assert rows.all() == [("c",)]


async def test_a_cancelled_transaction_leaves_nothing_and_the_next_one_runs(database: Database) -> None:
    begun = asyncio.Event()

    async def write() -> None:
        async with database.write() as transaction:
            await transaction.execute(insert(_TENANTS), _row("cancelled"))
            begun.set()
            await asyncio.Event().wait()

    writing = asyncio.create_task(write())
    await asyncio.wait_for(begun.wait(), 60)
    writing.cancel()
    await asyncio.wait([writing], timeout=60)
    async with asyncio.timeout(60), database.write() as transaction:
        await transaction.execute(insert(_TENANTS), _row("next"))
    assert await _names(database) == ["next"]


async def test_a_commit_that_fails_leaves_nothing_and_the_next_one_runs(database: Database) -> None:
    """The COMMIT fails as with a full disk: SQLite may still be in the transaction, unknown to SQLAlchemy."""
    engine = database.engine.sync_engine

    def fail(_connection: Connection) -> None:
        raise OSError("no space left on device")

    event.listen(engine, "commit", fail)
    try:
        for _ in range(2):
            with pytest.raises(Unavailable):
                async with database.write() as transaction:
                    await transaction.execute(insert(_TENANTS), _row("lost"))
    finally:
        event.remove(engine, "commit", fail)
    async with asyncio.timeout(60), database.write() as transaction:
        await transaction.execute(insert(_TENANTS), _row("next"))
    assert await _names(database) == ["next"]


async def test_any_driver_of_sqlite_names_the_same_database(database: Database) -> None:
    url = make_url(database.engine.url)
    if url.get_backend_name() != "sqlite":
        pytest.skip("SQLite's own")
    async with database.write() as transaction:
        await transaction.execute(insert(_TENANTS), _row("there"))
    for name in ("sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"):
        other = Database(create_engine(f"{name}:///{url.database}"))
        assert await _names(other) == ["there"]
        await other.close()
