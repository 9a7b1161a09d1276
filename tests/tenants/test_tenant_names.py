"""Names of tenants, as two processes that take one at once find them."""

import asyncio

import pytest
from sqlalchemy import func, select, text

from contracts.errors import InvalidRequest
from store.clock import utc_now
from store.database import Database, create_engine
from store.tables import Tenant
from tenants.tenant_names import create_tenant


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_of_two_tenants_of_one_name_made_at_once_the_second_is_refused(database_url: str) -> None:
    database = Database(create_engine(database_url))
    made = asyncio.Event()

    async def first() -> None:
        async with database.write() as transaction:
            await create_tenant(transaction, name="cats", clock=utc_now)
            made.set()
            # Until the other one waits for the name.
            while not await transaction.scalar(_WAITING):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def second() -> None:
        await made.wait()
        async with database.write() as transaction:
            await create_tenant(transaction, name="dogs", clock=utc_now)
            await create_tenant(transaction, name="cats", clock=utc_now)

    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(first(), second(), return_exceptions=True)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], InvalidRequest)
    async with database.read() as session:
        assert list(await session.scalars(select(Tenant.name))) == ["cats"]
    await database.close()


_WAITING = select(func.count()).select_from(text("pg_locks")).where(text("NOT granted AND locktype = 'transactionid'"))
