"""Tenants and keys from the command line, on the service's own database."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from migrations.upgrade import upgrade
from tenants.clock import utc_now
from tenants.database import Database, create_engine
from tenants.keys import create_key, create_tenant, find_tenant, list_keys, list_tenants, revoke_key
from tenants.settings import Settings

T = TypeVar("T")


def on_database(settings: Settings, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` on the settings' database, its schema brought up to date first. Raises what ``work`` raises."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    upgrade(settings.resolved_database_url())

    async def connected() -> T:
        database = Database(create_engine(settings.resolved_database_url()))
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(connected())


async def new_tenant(database: Database, name: str) -> str:
    """A tenant and its first key; returns the secret."""
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name=name, clock=utc_now)
        return (await create_key(transaction, tenant=tenant, note="made with the tenant", clock=utc_now)).secret


async def new_key(database: Database, tenant_name: str, note: str) -> str:
    """A key of the named tenant; returns the secret."""
    async with database.write() as transaction:
        tenant = await find_tenant(transaction, name=tenant_name)
        return (await create_key(transaction, tenant=tenant, note=note, clock=utc_now)).secret


async def end_key(database: Database, key: str) -> None:
    """Revoke a key."""
    async with database.write() as transaction:
        await revoke_key(transaction, prefix=key, clock=utc_now)


async def tenant_lines(database: Database) -> list[str]:
    """One line a tenant: name, id, when made."""
    async with database.read() as session:
        return [
            f"{tenant.name}\t{tenant.id}\t{tenant.created_at:%Y-%m-%d %H:%M}" for tenant in await list_tenants(session)
        ]


async def key_lines(database: Database, tenant_name: str) -> list[str]:
    """One line a key: first characters, state, when made, note."""
    async with database.read() as session:
        tenant = await find_tenant(session, name=tenant_name)
        return [
            f"{key.prefix}-…\t{'revoked' if key.revoked_at else 'live'}\t{key.created_at:%Y-%m-%d %H:%M}\t{key.note}"
            for key in await list_keys(session, tenant=tenant)
        ]
