"""Operators' orders for replicas in the database, both of them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from migrations.upgrade import upgrade
from store.clock import utc_now
from store.database import Database, create_engine
from tenants.replica_orders import ReplicaOrder, lift_order, order_replica, standing_orders

BASE, OTHER = "weft/tiny", "weft/other"


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'weft.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
    upgrade(url)
    database = Database(create_engine(url))
    yield database
    await database.close()


async def orders(database: Database, base: str = BASE) -> dict[str, tuple[ReplicaOrder, str | None]]:
    async with database.read() as session:
        return {name: (one.order, one.reason) for name, one in (await standing_orders(session, base)).items()}


async def test_the_last_order_stands_until_it_is_lifted(database: Database) -> None:
    async with database.write() as transaction:
        await order_replica(transaction, BASE, "a", ReplicaOrder.DRAIN, None, utc_now)
        await order_replica(transaction, BASE, "b", ReplicaOrder.DRAIN, "upkeep", utc_now)
        await order_replica(transaction, OTHER, "a", ReplicaOrder.SLEEP, None, utc_now)
        await order_replica(transaction, BASE, "a", ReplicaOrder.SLEEP, "night", utc_now)
    assert await orders(database) == {"a": (ReplicaOrder.SLEEP, "night"), "b": (ReplicaOrder.DRAIN, "upkeep")}
    async with database.write() as transaction:
        for _ in range(2):
            await lift_order(transaction, BASE, "a")
    assert list(await orders(database)) == ["b"]
    assert list(await orders(database, OTHER)) == ["a"]
