"""API processes have a row while they live: one that dies is told as dead and reaped, and the others stay."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from ledger.runtime import Runtime
from store.clock import utc_now
from store.database import Database, create_engine, session_name, this_host
from store.tables import ProcessKind, WorkerProcess
from tenants.ended_processes import list_ended
from tenants.worker_standings import ApiStanding, list_apis
from tests.workers.runtimes import make_runtime
from workers.leases.apis import ApiHeartbeat
from workers.leases.heartbeat import ENDLESS_LEASE
from workers.leases.processes import lock_expired, new_identity, renew
from workers.leases.reaper import reap_forsaken

LEASE = timedelta(seconds=0.2)


class Clock:
    """The monotonic clock of heartbeats, which moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("workers.leases.heartbeat.monotonic", made)
    return made


@pytest.fixture
async def runtime(migrated_postgres_url: str, tmp_path: Path) -> AsyncIterator[Runtime]:
    database = Database(create_engine(migrated_postgres_url))
    yield make_runtime(database, tmp_path, utc_now, lease=LEASE)
    await database.close()


async def apis(runtime: Runtime) -> list[ApiStanding]:
    async with runtime.database.read() as session:
        return await list_apis(session)


async def dead(runtime: Runtime) -> list[str]:
    async with runtime.database.read() as session:
        return [one.id for one in await list_ended(session, since=utc_now() - timedelta(hours=1))]


async def end_lease(runtime: Runtime, process: str, *, ago: timedelta = LEASE) -> None:
    async with runtime.database.write() as transaction:
        ends = update(WorkerProcess).where(WorkerProcess.id == process).values(expires_at=utc_now() - ago)
        await transaction.execute(ends)


async def test_a_dead_api_is_told_and_reaped_by_one_that_has_lived_for_a_lease(runtime: Runtime, clock: Clock) -> None:
    first, second = ApiHeartbeat(runtime), ApiHeartbeat(runtime)
    await first.look()
    (gone,) = await apis(runtime)
    await second.look()
    (kept,) = [one.id for one in await apis(runtime) if one.id != gone.id]
    await end_lease(runtime, gone.id)
    await second.look()
    assert len(await apis(runtime)) == 2, "one that has just come may itself have been cut off"
    assert gone.release is not None
    async with asyncio.timeout(60):
        while len(await apis(runtime)) == 2:
            clock.now += LEASE.total_seconds() / 4
            await second.look()
    assert [one.id for one in await apis(runtime)] == [kept]
    assert await dead(runtime) == [gone.id]


async def test_an_api_that_ends_in_order_leaves_no_row_and_no_death(runtime: Runtime) -> None:
    first, second = ApiHeartbeat(runtime), ApiHeartbeat(runtime)
    await first.look()
    await second.look()
    await first.leave()
    assert (len(await apis(runtime)), await dead(runtime)) == (1, [])


async def test_a_forsaken_api_is_reaped_by_housekeeping(runtime: Runtime) -> None:
    first, second = ApiHeartbeat(runtime), ApiHeartbeat(runtime)
    await first.look()
    (gone,) = await apis(runtime)
    await second.look()
    (kept,) = {api.id for api in await apis(runtime)} - {gone.id}
    await end_lease(runtime, kept, ago=timedelta(hours=-1))
    await end_lease(runtime, gone.id, ago=11 * LEASE)
    await reap_forsaken(runtime, may_declare_dead=lambda: True)
    assert ([api.id for api in await apis(runtime)], await dead(runtime)) == ([kept], [gone.id])


async def test_the_connections_of_an_api_that_was_only_slow_are_not_ended(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of the API would fail. Connections of trainers and pools are ended: others wait for their rows."""
    slow = ApiHeartbeat(runtime)
    await slow.look()
    (api,) = await apis(runtime)
    await end_lease(runtime, api.id)
    ended: list[set[str]] = []

    async def note(_transaction: object, names: set[str]) -> None:
        ended.append(names)

    monkeypatch.setattr("workers.leases.processes._end_sessions", note)
    async with runtime.database.write() as transaction:
        assert [one.id for one in await lock_expired(transaction, utc_now())] == [api.id]
    assert ended == [set()]


async def test_the_connections_of_a_process_with_a_dead_ones_host_and_pid_are_not_ended(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is started again has the name and the pid that it had. Those of another dead process are ended."""
    ended: list[set[str]] = []

    async def note(_transaction: object, names: set[str]) -> None:
        ended.append(names)

    monkeypatch.setattr("workers.leases.processes._end_sessions", note)
    dead = [new_identity(ProcessKind.TRAINER, "base") for _ in range(2)]
    async with runtime.database.write() as transaction:
        for identity in (*dead, new_identity(ProcessKind.TRAINER, "base")):
            await renew(transaction, identity, lease=timedelta(hours=1), clock=utc_now)
        await transaction.execute(
            update(WorkerProcess).where(WorkerProcess.id == dead[1].id).values(pid=os.getpid() + 1)
        )
    for identity in dead:
        await end_lease(runtime, identity.id)
    async with runtime.database.write() as transaction:
        assert {one.id for one in await lock_expired(transaction, utc_now())} == {one.id for one in dead}
    assert ended == [{session_name(this_host(), os.getpid() + 1)}]


async def test_a_service_that_is_alone_writes_its_row_once(migrated_database: Path, tmp_path: Path) -> None:
    database = Database(create_engine(f"sqlite+aiosqlite:///{migrated_database}"))
    runtime = make_runtime(database, tmp_path, utc_now, lease=LEASE)
    beat = ApiHeartbeat(runtime)
    running = asyncio.create_task(beat.run())
    for _ in range(2000):
        await asyncio.sleep(0.01)
        if found := await apis(runtime):
            break
    assert beat._pause() is None
    assert found[0].expires_at - found[0].started_at == ENDLESS_LEASE
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await beat.leave()
    await database.close()
