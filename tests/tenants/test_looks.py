"""Keys of operators' looks: they go a day after they have ended, and nobody else's key does."""

from datetime import datetime, timedelta

from sqlalchemy import select

from contracts.ids import TenantId
from store.clock import utc_now
from store.database import Database
from store.tables import ApiKey
from tenants.keys import create_key
from tenants.login_codes import delete_expired_codes
from tenants.looks import LOOK, begin_look, forget_looks
from tenants.rights import KeyRights, Role
from tests.tenants.usage_books import Books


async def test_keys_of_looks_go_a_day_after_they_have_ended_and_no_others(books: Books) -> None:
    began, database, tenant = utc_now(), books.database, books.tenants[0]
    async with database.write() as transaction:
        own = KeyRights(Role.VIEWER, expires_at=began + LOOK)
        kept = await create_key(transaction, tenant=tenant, note="own", clock=utc_now, rights=own)
        await begin_look(transaction, tenant, operator="op", reason="slow", clock=utc_now)
        last = await create_key(transaction, tenant=tenant, note="last", clock=utc_now)
    assert await _forgotten(database, began + LOOK + timedelta(hours=23)) == 0
    assert await _forgotten(database, began + LOOK + timedelta(hours=25)) == 1
    assert await _keys(database, tenant) == [kept.id, last.id]


async def _forgotten(database: Database, now: datetime) -> int:
    async with database.write() as transaction:
        await delete_expired_codes(transaction, now=now, most=10)
        return await forget_looks(transaction, now=now, most=10)


async def _keys(database: Database, tenant: TenantId) -> list[int]:
    async with database.read() as session:
        return list(await session.scalars(select(ApiKey.id).where(ApiKey.tenant_id == tenant).order_by(ApiKey.id)))
