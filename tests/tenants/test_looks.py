"""Keys of operators' looks: they go a day after they have ended, and nobody else's key does."""

from contextlib import suppress
from datetime import datetime, timedelta

import pytest
from sqlalchemy import select

from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from store.clock import utc_now
from store.database import Database
from store.settings import Settings
from store.tables import ApiKey
from tenants import keys
from tenants.keys import create_key
from tenants.limits import Limits
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


async def test_a_tenant_with_as_many_keys_as_are_kept_can_be_looked_at(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse the tenant a further key of its own, and make another tenant's."""
    monkeypatch.setattr(keys, "MOST_KEYS", 2)
    full, beside = books.tenants[:2]
    limits = Limits.of(Settings())
    async with books.database.write() as transaction:
        for _ in range(3 - len(await _keys(books.database, full))):
            with suppress(InvalidRequest):
                await create_key(transaction, tenant=full, note="", clock=utc_now, defaults=limits)
        with pytest.raises(InvalidRequest, match="the most"):
            await create_key(transaction, tenant=full, note="", clock=utc_now, defaults=limits)
        await create_key(transaction, tenant=beside, note="", clock=utc_now, defaults=limits)
        assert await begin_look(transaction, full, operator="op", reason="slow", clock=utc_now)


async def _forgotten(database: Database, now: datetime) -> int:
    async with database.write() as transaction:
        await delete_expired_codes(transaction, now=now, most=10)
        return await forget_looks(transaction, now=now, most=10)


async def _keys(database: Database, tenant: TenantId) -> list[int]:
    async with database.read() as session:
        return list(await session.scalars(select(ApiKey.id).where(ApiKey.tenant_id == tenant).order_by(ApiKey.id)))
