"""Outcomes of version commands, as a publisher is told them: away for a while, or unable for good."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import pytest

from contracts.errors import EngineFailure, InvalidRequest, Unavailable, WeftError
from contracts.ids import CheckpointId, RunId
from store.tables import ProcessKind, VersionCommand
from tests.workers.housekeeping.conftest import House
from workers.cluster.publication import ClusterPublication
from workers.cluster.version_commands import VersionCommandRunner
from workers.leases.processes import new_identity, renew

OURS, THEIRS = CheckpointId("0" * 32), CheckpointId("1" * 32)


@asynccontextmanager
async def pool(house: House, failure: WeftError | None) -> AsyncIterator[list[CheckpointId]]:
    """A sampling process that fails to load ``OURS`` with ``failure``. Yields the versions that it was to drop."""
    dropped: list[CheckpointId] = []

    async def prepare(_run: RunId, version: CheckpointId) -> None:
        if version == OURS and failure is not None:
            raise failure

    async def withdraw(version: CheckpointId) -> None:
        dropped.append(version)

    identity = new_identity(ProcessKind.POOL, "base")
    async with house.database.write() as transaction:
        await renew(transaction, identity, lease=timedelta(hours=1), clock=house.clock)
    task = asyncio.create_task(VersionCommandRunner(identity.id, prepare, withdraw, house.runtime).run())
    try:
        yield dropped
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ((None, Unavailable("away")), Unavailable),
        ((InvalidRequest("damaged"), Unavailable("away")), EngineFailure),
        ((Unavailable("away"), EngineFailure("broken")), EngineFailure),
    ],
)
async def test_a_publisher_is_told_whether_every_failure_is_for_a_while(
    house: House, failures: tuple[WeftError | None, ...], told: type[WeftError]
) -> None:
    """All processes drop the version then. Another tenant's version is loaded at the same time."""
    publication = ClusterPublication(house.database, house.runtime.wakeups, house.clock, patience=timedelta(seconds=60))
    async with AsyncExitStack() as pools:
        dropped = [await pools.enter_async_context(pool(house, failure)) for failure in failures]
        (_, _, run), (_, _, other) = await house.run("ours"), await house.run("theirs")
        ours, theirs = await asyncio.gather(
            publication.prepare("base", run, OURS), publication.prepare("base", other, THEIRS), return_exceptions=True
        )
        assert type(ours) is told
        assert theirs is None
        assert dropped == [[OURS], [OURS]]
    assert await house.count(VersionCommand) == 0


async def test_a_process_that_ends_waits_for_no_version(house: House) -> None:
    """The caller asks another process; no command of the ended one stays."""
    wakeups = house.runtime.wakeups
    publication = ClusterPublication(house.database, wakeups, house.clock, patience=timedelta(hours=1))
    silent = new_identity(ProcessKind.POOL, "base")
    async with house.database.write() as transaction:
        await renew(transaction, silent, lease=timedelta(hours=1), clock=house.clock)
    (_, _, run), (_, _, other) = await house.run("ours"), await house.run("theirs")
    async with asyncio.timeout(20):
        waiting = [
            asyncio.create_task(publication.prepare("base", one, version))
            for one, version in ((run, OURS), (other, THEIRS))
        ]
        while len(wakeups.topics()) < len(waiting):  # noqa: ASYNC110
            await asyncio.sleep(0)
        wakeups.close()
        told = await asyncio.gather(*waiting, publication.withdraw([OURS]), return_exceptions=True)
    assert [type(one) for one in told] == [Unavailable, Unavailable, set]
    assert await house.count(VersionCommand) == 0
