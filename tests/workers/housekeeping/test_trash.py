"""Folders of deleted checkpoints go when nothing reads them any more, and not before."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from contracts.errors import EngineFailure
from contracts.ids import CheckpointId, RequestId
from ledger.wakeups import Wakeups
from store.repeat import wait_for
from store.tables import ProcessKind, SampleInFlight, VersionCommand, WorkerProcess
from tenants.checkpoints import directory_of
from tenants.gates import Dispatch, clear_all_in_flight, make_gates, mark_in_flight
from tenants.sampled_versions import SampledVersion, held_versions
from tests.workers.housekeeping.conftest import House, open_house
from workers.cluster.publication import ClusterPublication
from workers.leases.processes import declare_all_dead

BOTH = 2


@pytest.fixture
async def shared_house(migrated_postgres_url: str, tmp_path: Path) -> AsyncIterator[House]:
    """An empty service on PostgreSQL, where transactions of several processes are open at once."""
    async with open_house(migrated_postgres_url, tmp_path) as made:
        yield made


async def prepare(*_: object) -> None:
    """Load nothing."""


def is_there(house: House, version: CheckpointId) -> bool:
    """Return whether the version's folder is there."""
    return house.folder.path(directory_of(version)).exists()


async def test_a_folder_stays_until_the_last_sample_that_draws_from_it_has_ended(house: House) -> None:
    """The sample is a pool's of another process, and runs for an hour. Another tenant's folder goes meanwhile."""
    tenant, _, run = await house.run("first")
    other, _, other_run = await house.run("second")
    drawn = await house.checkpoint(tenant, run, "drawn", ttl=60)
    idle = await house.checkpoint(other, other_run, "idle", ttl=60)
    async with house.database.write() as transaction:
        transaction.add(
            SampleInFlight(
                operation_id="long",
                tenant_id=tenant,
                base_model="base",
                run_id=run,
                version=drawn,
                replica="r",
                process="a pool",
                since=house.now,
            )
        )
    await house.empty_trash()
    for _ in range(3):
        await house.pass_time(timedelta(minutes=20))
        await house.sweep()
        assert (is_there(house, drawn), is_there(house, idle)) == (True, False)
    async with house.database.write() as transaction:
        # As reaping a dead pool does.
        await clear_all_in_flight(transaction, "a pool")
    await house.sweep()
    assert not is_there(house, drawn)


async def test_a_folder_stays_for_a_dispatch_that_read_its_version_before_the_deletion(shared_house: House) -> None:
    """Housekeeping sees the sample in flight only once the dispatch commits. Another tenant's folder goes meanwhile."""
    house = shared_house
    tenant, session, run = await house.run("first")
    other, _, other_run = await house.run("second")
    idle = await house.checkpoint(other, other_run, "idle", ttl=1)
    house.now += timedelta(seconds=2)
    await house.sweep()
    drawn = await house.checkpoint(tenant, run, "drawn", ttl=58)
    sampler = await house.sampler(tenant, session, 0, drawn)
    dispatch = Dispatch(RequestId("long"), tenant, "base", run, drawn, "r", "a pool")
    async with house.database.write() as transaction:
        await make_gates(transaction, dispatch, house.clock)
    async with house.database.write() as dispatching:
        found = await held_versions(dispatching, [(tenant, sampler)], house.clock)
        assert isinstance(found[0], SampledVersion)
        await house.empty_trash()
        assert await house.checkpoints() == set()
        assert (is_there(house, drawn), is_there(house, idle)) == (True, False)
        await mark_in_flight(dispatching, [dispatch], house.clock)
    await house.empty_trash()
    assert is_there(house, drawn)
    async with house.database.write() as transaction:
        await clear_all_in_flight(transaction, "a pool")
    await house.sweep()
    assert not is_there(house, drawn)


async def test_a_folder_stays_while_a_replica_keeps_its_version(house: House) -> None:
    tenant, _, run = await house.run("first")
    kept, let_go = await house.checkpoint(tenant, run, "a", ttl=60), await house.checkpoint(tenant, run, "b", ttl=60)
    is_kept = True

    async def withdraw(version: CheckpointId) -> None:
        if version == kept and is_kept:
            raise EngineFailure("the replica does not unload it")

    house.publication.register("base", prepare, withdraw)
    await house.empty_trash()
    await house.empty_trash()
    assert (is_there(house, kept), is_there(house, let_go)) == (True, False)
    is_kept = False
    await house.empty_trash()
    assert not is_there(house, kept)


async def test_a_process_that_dies_after_the_deletion_leaves_no_folder_behind(house: House) -> None:
    """Housekeeping is cut off between deleting the row and removing the folder."""
    tenant, _, run = await house.run("first")
    version = await house.checkpoint(tenant, run, "a", ttl=60)
    stuck = asyncio.Event()

    async def withdraw(_version: CheckpointId) -> None:
        stuck.set()
        await asyncio.Event().wait()

    house.publication.register("base", prepare, withdraw)
    house.now += timedelta(seconds=61)
    await house.sweep()
    house.now += timedelta(seconds=61)
    dying = asyncio.create_task(house.keeping.sweep())
    await asyncio.wait_for(stuck.wait(), 30)
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    assert is_there(house, version)
    house.publication._withdraw.clear()
    await house.sweep()
    assert not is_there(house, version)


@pytest.mark.parametrize("pool", ["alive", "dead", "dies meanwhile"])
async def test_a_version_is_read_as_long_as_a_living_pool_has_not_unloaded_it(house: House, pool: str) -> None:
    """The pool does not answer: its samples draw from the version, or it has died."""
    async with house.database.write() as transaction:
        transaction.add(
            WorkerProcess(
                id="pool",
                kind=ProcessKind.POOL,
                base_model="base",
                host="h",
                pid=1,
                started_at=house.now,
                expires_at=house.now + timedelta(hours=1),
            )
        )

    async def die() -> None:
        while pool == "dies meanwhile" and not await house.count(VersionCommand):
            await wait_for(asyncio.Event(), 0.02)
        async with house.database.write() as transaction:
            await declare_all_dead(transaction)

    if pool == "dead":
        await die()
    patience = timedelta(seconds=60 if pool == "dies meanwhile" else 0.2)
    publication = ClusterPublication(house.database, Wakeups(), house.clock, patience=patience)
    dying = asyncio.create_task(die()) if pool == "dies meanwhile" else None
    versions = [CheckpointId("v1"), CheckpointId("v2")]
    unread = await publication.withdraw(versions)
    assert len(unread) == (0 if pool == "alive" else BOTH)
    if dying is not None:
        await dying
