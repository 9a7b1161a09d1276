"""Fixtures of tests of what belongs to tenants."""

from collections.abc import AsyncIterator

import pytest_asyncio

from store.database import Database, create_engine
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from tests.tenants.usage_books import NOON, Books


@pytest_asyncio.fixture
async def books(database_url: str) -> AsyncIterator[Books]:
    made = Books(Database(create_engine(database_url)))
    async with made.database.write() as transaction:
        for name in ("cats", "dogs"):
            tenant = await create_tenant(transaction, name=name, clock=lambda: NOON)
            made.tenants.append(tenant)
            new = NewSession([], None, "raw", None, None)
            made.sessions.append(await create_session(transaction, tenant, new, lambda: NOON))
    yield made
    await made.database.close()
