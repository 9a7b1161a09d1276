"""Tenants with keys for tests and benchmarks, made directly in a service's database."""

from pathlib import Path

from cli.administration import new_tenant, on_database
from store.database import Database
from store.settings import Settings


def make_tenants(data: Path, names: list[str], *, database_url: str | None = None) -> list[str]:
    """Make a tenant for each name in a service's database and return their keys. The service need not run yet."""

    async def make(database: Database) -> list[str]:
        return [await new_tenant(database, name) for name in names]

    return on_database(Settings(data_dir=data, database_url=database_url), make)
