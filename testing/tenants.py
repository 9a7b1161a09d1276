"""Tenants with keys, made straight in a service's database: what a test or a benchmark starts with."""

from pathlib import Path

from cli.administration import new_tenant, on_database
from store.database import Database
from store.settings import Settings


def make_tenants(data: Path, names: list[str], *, database_url: str | None = None) -> list[str]:
    """A tenant and its key for each name, in the data folder, or the database, of a service that runs or will run."""

    async def make(database: Database) -> list[str]:
        return [await new_tenant(database, name) for name in names]

    return on_database(Settings(data_dir=data, database_url=database_url), make)
