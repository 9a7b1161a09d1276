"""Projects of two tenants, on both databases."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import event

from contracts.ids import TenantId
from store.database import Database, create_engine
from tenants.projects import ProjectInfo, create_project, list_projects
from tenants.tenant_names import create_tenant

NOW = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
async def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    # A transaction stands still here until another one waits for it.
    monkeypatch.setattr("store.database.IDLE_SECONDS", 300.0)
    opened = Database(create_engine(database_url))
    yield opened
    await opened.close()


async def make(database: Database, tenant: TenantId) -> ProjectInfo:
    async with database.write() as transaction:
        return await create_project(transaction, tenant, "archive", lambda: NOW)


async def test_two_requests_at_once_make_one_project_of_a_name(database: Database, database_url: str) -> None:
    async with database.write() as transaction:
        mine = await create_tenant(transaction, name="one", clock=lambda: NOW)
        theirs = await create_tenant(transaction, name="two", clock=lambda: NOW)
    engine, inserting = create_engine(database_url), asyncio.Event()
    beside = Database(engine)

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO projects"):
            inserting.set()

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    async with asyncio.timeout(60):
        async with database.write() as transaction:
            first = await create_project(transaction, mine, "archive", lambda: NOW)
            second = asyncio.create_task(make(beside, mine))
            if database_url.startswith("postgresql"):
                # The second request has looked for the name, and waits for the first one's end. SQLite has one writer.
                await inserting.wait()
        again = await second
        other = await make(beside, theirs)
    assert (first.is_new, again.is_new, other.is_new) == (True, False, True)
    assert (again.id, again.created_at) == (first.id, NOW)
    assert other.id != first.id
    async with database.read() as session:
        assert [one.name for one in await list_projects(session, mine)] == ["default", "archive"]
    await beside.close()
