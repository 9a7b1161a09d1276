"""Replica directives are stored, replaced and lifted, on both databases."""

from collections.abc import AsyncIterator

import pytest

from store.clock import utc_now
from store.database import Database, create_engine
from tenants.replica_directives import ReplicaDirective, direct_replica, lift_directive, standing_directives

BASE, OTHER = "weft/tiny", "weft/other"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(create_engine(database_url))
    yield database
    await database.close()


async def directives(database: Database, base: str = BASE) -> dict[str, tuple[ReplicaDirective, str | None]]:
    async with database.read() as session:
        return {name: (one.directive, one.reason) for name, one in (await standing_directives(session, base)).items()}


async def test_the_last_directive_stands_until_it_is_lifted(database: Database) -> None:
    async with database.write() as transaction:
        await direct_replica(transaction, BASE, "a", ReplicaDirective.DRAIN, None, utc_now)
        await direct_replica(transaction, BASE, "b", ReplicaDirective.DRAIN, "upkeep", utc_now)
        await direct_replica(transaction, OTHER, "a", ReplicaDirective.SLEEP, None, utc_now)
        await direct_replica(transaction, BASE, "a", ReplicaDirective.SLEEP, "night", utc_now)
    assert await directives(database) == {
        "a": (ReplicaDirective.SLEEP, "night"),
        "b": (ReplicaDirective.DRAIN, "upkeep"),
    }
    async with database.write() as transaction:
        for _ in range(2):
            await lift_directive(transaction, BASE, "a")
    assert list(await directives(database)) == ["b"]
    assert list(await directives(database, OTHER)) == ["a"]
