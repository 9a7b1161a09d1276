"""Three API processes over one PostgreSQL."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from store.clock import utc_now
from tenants.limits import set_tenant
from tenants.tenant_names import create_tenant
from tests.ledger.api_processes import MOST, PROCESSES, Process, process


@pytest_asyncio.fixture
async def processes(migrated_postgres_url: str, tmp_path: Path) -> AsyncIterator[list[Process]]:
    """Three of them over one database with the tenants ``cats``, who may do little, and ``dogs``."""
    made = [process(migrated_postgres_url, tmp_path) for _ in range(PROCESSES)]
    async with made[0].database.write() as transaction:
        await create_tenant(transaction, name="cats", clock=utc_now)
        await create_tenant(transaction, name="dogs", clock=utc_now)
        await set_tenant(transaction, name="cats", limits={"pending_samples": MOST, "pending_operations": MOST})
    yield made
    for one in made:
        await one.database.close()
