"""Administration from the command line: tenants and usage, read and written in the service's database."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy.engine import make_url

from cli.operator_log import noted_command, operator
from migrations.upgrade import check_not_older, upgrade
from store.clock import utc_now
from store.database import Database, create_engine
from store.private_folder import open_private_folder
from store.settings import Settings
from telemetry.security import SecurityEvent, SecurityRecord
from telemetry.security import note as note_event
from tenants.keys import create_key, create_tenant, list_tenants
from tenants.rights import KeyRights, Role
from tenants.usage import usage

T = TypeVar("T")


def on_database(settings: Settings, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` on the settings' database and return its result. Raises what ``work`` raises.

    An SQLite schema is brought up to date first. For an old PostgreSQL schema, which ``weft db upgrade`` brings up to
    date, it raises ``InvalidRequest``.
    """
    open_private_folder(settings.data_dir)
    with noted_command(settings):
        return _on_current_database(settings, work)


def _on_current_database(settings: Settings, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
    url = settings.resolved_database_url()
    if make_url(url).get_backend_name() == "sqlite":
        upgrade(url)
    else:
        check_not_older(url)

    async def connected() -> T:
        database = Database(create_engine(settings.resolved_database_url()))
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(connected())


async def new_tenant(database: Database, name: str) -> str:
    """Make a tenant and its first key, an administrator's; return the key's secret."""
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name=name, clock=utc_now)
        key = await create_key(
            transaction, tenant=tenant, note="made with the tenant", clock=utc_now, rights=KeyRights(Role.ADMIN)
        )
    note_event_of(SecurityEvent.TENANT_CREATED, tenant, name)
    note_event_of(SecurityEvent.KEY_CREATED, tenant, key.prefix)
    return key.secret


def note_event_of(event: SecurityEvent, tenant: str, resource: str) -> None:
    """Note what this command's operator has done with a tenant's ``resource``."""
    note_event(SecurityRecord(event=event, outcome="done", actor=operator(), tenant=tenant, resource=resource))


async def tenant_lines(database: Database) -> list[str]:
    """Return one line for each tenant: name, id, time of creation."""
    async with database.read() as session:
        return [
            f"{tenant.name}\t{tenant.id}\t{tenant.created_at:%Y-%m-%d %H:%M}" for tenant in await list_tenants(session)
        ]


async def usage_lines(database: Database, days: int) -> list[str]:
    """Return one line for each tenant, day, base model and kind of operation: operations done, and their tokens."""
    since = utc_now().date() - timedelta(days=days - 1)
    async with database.read() as session:
        return [
            f"{line.tenant}\t{line.day}\t{line.base_model}\t{line.kind}\t{line.operations}\t{line.tokens}"
            for line in await usage(session, since=since)
        ]
