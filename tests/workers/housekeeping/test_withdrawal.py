"""Versions are withdrawn from many pools together: what it costs does not grow with their number."""

import asyncio
from datetime import timedelta

from sqlalchemy import event

from contracts.ids import CheckpointId
from store.tables import ProcessKind, VersionCommand
from tests.workers.housekeeping.conftest import House
from workers.cluster.publication import ClusterPublication
from workers.cluster.version_commands import VersionCommandRunner
from workers.leases.processes import new_identity, renew

POOLS = 50
VERSIONS = [CheckpointId(f"{number:032x}") for number in range(20)]


async def _nothing(*_: object) -> None: ...


async def test_twenty_versions_at_fifty_pools_take_a_few_statements_of_each(house: House) -> None:
    forgotten: list[CheckpointId] = []

    async def withdraw(version: CheckpointId) -> None:
        forgotten.append(version)

    pools = [new_identity(ProcessKind.POOL, "base") for _ in range(POOLS)]
    async with house.database.write() as transaction:
        for pool in pools:
            await renew(transaction, pool, lease=timedelta(hours=1), clock=house.clock)
    runners = [VersionCommandRunner(pool.id, _nothing, withdraw, house.runtime) for pool in pools]
    tasks = [asyncio.create_task(runner.run()) for runner in runners]
    statements: list[str] = []
    event.listen(house.database.engine.sync_engine, "before_cursor_execute", lambda *told: statements.append(told[2]))
    publication = ClusterPublication(house.database, house.runtime.wakeups, house.clock, patience=timedelta(seconds=60))
    try:
        await publication.withdraw(VERSIONS)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(forgotten) == sorted(VERSIONS * POOLS)
    assert await house.count(VersionCommand) == 0
    assert len([one for one in statements if not one.startswith("BEGIN")]) < 10 * POOLS
