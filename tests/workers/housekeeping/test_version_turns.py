"""Tenants take turns at a sampling process: no tenant's version commands hide another's publication."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import delete, insert

from contracts.base_model import read_base_model_facts
from contracts.ids import CheckpointId, RunId
from contracts.service_class import FACTORS, ServiceClass
from engine.sampling.vocabulary import read_vocabulary
from store.tables import ProcessKind, VersionCommand
from tenants.limits import set_tenant
from tests.workers.housekeeping.conftest import House
from workers.cluster.publication import ClusterPublication
from workers.cluster.version_commands import VersionCommandKind, VersionCommandRunner
from workers.leases.processes import WorkerIdentity, new_identity, renew
from workers.sampling.sampler_wiring import wire_sampling

FLOOD = 300
LOADS_OF_TENANT = 8
DEADLINE = 60


@dataclass
class Replicas:
    """Replicas on which one run's versions load, and are dropped, once they may; others at once."""

    stuck: RunId
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    loading: int = 0
    most: int = 0
    """Most of the stuck run's versions that were loaded at a time."""
    loaded: set[CheckpointId] = field(default_factory=set)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def prepare(self, run: RunId, version: CheckpointId) -> None:
        """Load a version."""
        if run == self.stuck:
            self.loading += 1
            self.most = max(self.most, self.loading)
            async with self.changed:
                self.changed.notify_all()
            await self.may_end.wait()
            self.loading -= 1
        async with self.changed:
            self.loaded.add(version)
            self.changed.notify_all()

    async def withdraw(self, _version: CheckpointId) -> None:
        """Drop a version."""
        await self.may_end.wait()

    async def until_loaded(self, count: int) -> None:
        """Wait until so many versions are loaded."""
        async with asyncio.timeout(DEADLINE), self.changed:
            await self.changed.wait_for(lambda: len(self.loaded) >= count)


@asynccontextmanager
async def running(house: House, pool: WorkerIdentity, replicas: Replicas) -> AsyncIterator[None]:
    """Run the pool's version commands."""
    async with house.database.write() as transaction:
        await renew(transaction, pool, lease=timedelta(hours=1), clock=house.clock)
    runner = VersionCommandRunner(pool.id, replicas.prepare, replicas.withdraw, house.runtime)
    task = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        task.cancel()
        replicas.may_end.set()
        # What was begun is recorded yet, before the database is closed.
        begun = [one for one in asyncio.all_tasks() if one.get_name().startswith(("version commands", "batcher"))]
        await asyncio.gather(task, *begun, return_exceptions=True)


async def flood(house: House, pool: WorkerIdentity, kind: VersionCommandKind, run: RunId | None) -> set[CheckpointId]:
    """Send the pool very many commands, each about a version of its own."""
    versions = [CheckpointId(f"{number:032x}") for number in range(FLOOD)]
    same = {"process_id": pool.id, "kind": kind, "run_id": run, "created_at": house.clock()}
    async with house.database.write() as transaction:
        await transaction.execute(
            insert(VersionCommand), [{"id": str(uuid4()), "version": version, **same} for version in versions]
        )
    house.now += timedelta(seconds=1)
    return set(versions)


def publication(house: House) -> ClusterPublication:
    """The publication of a process beside the pool."""
    return ClusterPublication(house.database, house.runtime.wakeups, house.clock, patience=timedelta(seconds=DEADLINE))


@pytest.mark.parametrize("kind", [*VersionCommandKind])
async def test_a_flood_of_one_tenants_commands_does_not_hide_a_neighbours_publication(
    either_house: House, kind: VersionCommandKind
) -> None:
    house, pool = either_house, new_identity(ProcessKind.POOL, "base")
    _, _, cats = await house.run("cats")
    _, _, dogs = await house.run("dogs")
    replicas, theirs = Replicas(cats), CheckpointId("d" * 32)
    await flood(house, pool, kind, cats if kind is VersionCommandKind.PREPARE else None)
    async with running(house, pool, replicas):
        await publication(house).prepare("base", dogs, theirs)
        assert replicas.loaded == {theirs}
        assert replicas.most <= LOADS_OF_TENANT


async def test_a_flood_is_carried_out_to_its_end_a_few_loads_at_a_time(either_house: House) -> None:
    house, pool = either_house, new_identity(ProcessKind.POOL, "base")
    _, _, cats = await house.run("cats")
    _, _, dogs = await house.run("dogs")
    replicas, theirs = Replicas(cats), CheckpointId("d" * 32)
    versions = await flood(house, pool, VersionCommandKind.PREPARE, cats)
    async with running(house, pool, replicas):
        await publication(house).prepare("base", dogs, theirs)
        replicas.may_end.set()
        # Each that ends leaves its turn to the next one at once: looks every few seconds would take minutes.
        await replicas.until_loaded(FLOOD + 1)
        assert replicas.loaded == versions | {theirs}
        assert replicas.most == LOADS_OF_TENANT


async def test_loads_that_hang_count_until_they_end_although_their_publisher_has_given_up(either_house: House) -> None:
    """Publications that give up delete their commands. A neighbour's version is loaded all the while."""
    house, pool = either_house, new_identity(ProcessKind.POOL, "base")
    _, _, cats = await house.run("cats")
    _, _, dogs = await house.run("dogs")
    replicas = Replicas(cats)
    async with running(house, pool, replicas):
        for first in range(2):
            await flood(house, pool, VersionCommandKind.PREPARE, cats)
            await publication(house).prepare("base", dogs, CheckpointId(f"d{first:031x}"))
            async with asyncio.timeout(DEADLINE), replicas.changed:
                await replicas.changed.wait_for(lambda: replicas.loading == LOADS_OF_TENANT)
            async with house.database.write() as transaction:
                await transaction.execute(delete(VersionCommand))
        assert replicas.most == LOADS_OF_TENANT
        assert len(replicas.loaded) == 2
        # Once they have ended, others are loaded.
        versions = await flood(house, pool, VersionCommandKind.PREPARE, cats)
        replicas.may_end.set()
        await replicas.until_loaded(FLOOD + 2)
        assert versions <= replicas.loaded


class NotedLoads:
    """A replica that notes in whose turns versions are loaded."""

    name = "noted"

    def __init__(self) -> None:
        self.loads: list[tuple[str, str, float]] = []

    async def load(self, version: Any, *, owner: str = "", share: float = 1.0) -> None:
        """Load a version."""
        self.loads.append((version.name, owner, share))


async def test_a_publications_load_takes_the_turns_of_its_runs_tenant(
    either_house: House, tiny_model_dir: Path
) -> None:
    house, replica = either_house, NotedLoads()
    cats, _, mine = await house.run("cats")
    dogs, _, theirs = await house.run("dogs")
    async with house.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={}, share=2.0, service_class=ServiceClass.INTERACTIVE)
    facts = read_base_model_facts("base", tiny_model_dir, None)
    sampling = wire_sampling(house.runtime, facts, read_vocabulary(tiny_model_dir), [])
    router: Any = sampling.pool.router
    router.put(replica)
    for run in (mine, theirs):
        router.replicas[0].note(f"old of {run}", run)
        await sampling.prepare(run, CheckpointId(f"new of {run}"))
    share = 2.0 * FACTORS[ServiceClass.INTERACTIVE]
    assert replica.loads == [(f"new of {mine}", cats, share), (f"new of {theirs}", dogs, 1.0)]
