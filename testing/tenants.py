"""Tenants with keys for tests and benchmarks, made directly in a service's database."""

from pathlib import Path

from cli.administration import checked_database, on_database
from store.clock import utc_now
from store.database import Database
from store.settings import Settings
from tenants.keys import create_key, revoke_key
from tenants.rights import KeyRights, Role
from tenants.tenant_names import create_tenant, find_tenant


def make_tenants(data: Path, names: list[str], *, database_url: str | None = None) -> list[str]:
    """Make a tenant for each name in a service's database and return their keys. The service need not run yet."""

    async def make(database: Database) -> list[str]:
        return [await new_tenant(database, name) for name in names]

    settings = Settings(data_dir=data, database_url=database_url)
    checked_database(settings)
    return on_database(settings, make)


async def new_tenant(database: Database, name: str) -> str:
    """Make a tenant and its first key, an administrator's; return the key's secret."""
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name=name, clock=utc_now)
        rights = KeyRights(Role.ADMIN)
        made = await create_key(transaction, tenant=tenant, note="made with the tenant", clock=utc_now, rights=rights)
    return made.secret


async def new_key(database: Database, tenant_name: str) -> str:
    """Make a member's key of the named tenant; return its secret. Raises ``NotFound``."""
    async with database.write() as transaction:
        tenant = await find_tenant(transaction, name=tenant_name)
        return (await create_key(transaction, tenant=tenant, note="", clock=utc_now)).secret


async def end_key(database: Database, key: str) -> None:
    """Revoke the key with this text or prefix, as another process does: nothing else is ended. Raises ``NotFound``."""
    async with database.write() as transaction:
        await revoke_key(transaction, prefix=key, clock=utc_now)
