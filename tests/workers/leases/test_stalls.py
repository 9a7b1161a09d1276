"""A database that stalls for all processes at once makes none of them look dead to another."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from ledger.runtime import Runtime
from store.clock import Clock, utc_now
from store.database import Database, create_engine
from store.tables import EndedProcess, ProcessKind
from tests.workers.runtimes import make_runtime
from workers.leases.heartbeat import RENEWALS, Heartbeat
from workers.leases.processes import new_identity
from workers.leases.reaper import reap_peers

LEASE = timedelta(seconds=30)
RENEWAL = LEASE.total_seconds() / RENEWALS
SECONDS = 60


@dataclass
class House:
    """Living processes of every kind, which share a database and its time."""

    runtime: Runtime
    began: datetime = field(default_factory=utc_now)
    seconds: float = 0.0
    """Time since ``began``, on the database's clock and on the hosts' monotonic ones."""
    beats: list[Heartbeat] = field(default_factory=list)

    async def database_now(self, session: AsyncSession, _clock: Clock) -> datetime:
        """Return the database's time, which a query reads."""
        await session.execute(select(1))
        return self.began + timedelta(seconds=self.seconds)

    def open(self, kind: ProcessKind, base_model: str) -> Heartbeat:
        """Add a process."""
        self.beats.append(Heartbeat(new_identity(kind, base_model), self.runtime))
        return self.beats[-1]

    async def look(self, beat: Heartbeat) -> None:
        """Renew and reap as a process's loop does."""
        await beat.renew()
        await reap_peers(self.runtime, beat)

    async def live(self, seconds: float) -> None:
        """Have every process look, each in its turn, through the time."""
        until = self.seconds + seconds
        while self.seconds < until:
            for beat in self.beats:
                self.seconds += RENEWAL / len(self.beats)
                await self.look(beat)

    async def reaped(self) -> set[str]:
        """Return the ids of the processes that were taken for dead, whether they have come back or not."""
        async with self.runtime.database.read() as session:
            return set(await session.scalars(select(EndedProcess.id)))

    async def waiting(self) -> int:
        """Return how many statements wait for a lock on the table of processes."""
        query = "SELECT count(*) FROM pg_locks WHERE relation = 'worker_processes'::regclass AND NOT granted"
        async with self.runtime.database.engine.connect() as connection:
            return int(await connection.scalar(text(query)) or 0)

    async def stall(self, beats: list[Heartbeat], seconds: float) -> None:
        """Have every look of ``beats`` hang in its renewal for the time, after it has read the time."""
        async with self.runtime.database.engine.connect() as other, asyncio.timeout(SECONDS):
            await other.execute(text("LOCK TABLE worker_processes IN EXCLUSIVE MODE"))
            looks = [asyncio.create_task(self.look(beat)) for beat in beats]
            while await self.waiting() < len(beats):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            self.seconds += seconds
            await other.rollback()
            await asyncio.gather(*looks)


@pytest_asyncio.fixture
async def house(migrated_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    database = Database(create_engine(migrated_postgres_url))
    made = House(make_runtime(database, tmp_path, utc_now, lease=LEASE))
    monkeypatch.setattr("workers.leases.heartbeat.monotonic", lambda: made.seconds)
    for module in ("processes", "reaper"):
        monkeypatch.setattr(f"workers.leases.{module}.database_now", made.database_now)
    for _ in range(2):
        made.open(ProcessKind.TRAINER, "test/cats")
        made.open(ProcessKind.POOL, "test/cats")
        made.open(ProcessKind.API, "")
    made.open(ProcessKind.TRAINER, "test/dogs")
    await made.live(1.5 * LEASE.total_seconds())
    assert all(beat.may_declare_dead for beat in made.beats)
    yield made
    await database.close()


@pytest.mark.parametrize("stall", [RENEWALS + 1.0, RENEWALS - 0.5])
async def test_processes_that_a_stall_keeps_from_renewing_are_all_alive(house: House, stall: float) -> None:
    """The stall in renewals. In the shorter one only the lease of a process ends that had renewed some time before."""
    early, *others = house.beats
    house.seconds += 0.9 * RENEWAL
    for beat in others:
        await house.look(beat)
    await house.stall(others, stall * RENEWAL)
    for beat in others:
        await house.look(beat)
    await house.look(early)
    assert await house.reaped() == set()


async def test_a_stall_between_a_renewal_and_the_look_for_the_dead_makes_nobody_dead(house: House) -> None:
    for beat in house.beats:
        await beat.renew()
    house.seconds += LEASE.total_seconds() + 1
    for beat in house.beats:
        await reap_peers(house.runtime, beat)
    assert await house.reaped() == set()


async def test_a_process_that_dies_in_a_stall_is_reaped_once_the_others_have_lived_for_a_lease(house: House) -> None:
    gone = house.beats.pop(0)
    await house.stall(house.beats, LEASE.total_seconds() + 1)
    await house.live(LEASE.total_seconds() - 2 * RENEWAL)
    assert await house.reaped() == set()
    await house.live(4 * RENEWAL)
    assert await house.reaped() == {gone.identity.id}


async def test_a_process_never_reaps_itself(house: House) -> None:
    """The supervisor says that it has exited, or its own renewal was late."""
    (mine,) = [beat for beat in house.beats if beat.identity.base_model == "test/dogs"]
    async with house.runtime.database.write() as transaction:
        ended = text("UPDATE worker_processes SET expires_at = '2000-01-01T00:00:00Z' WHERE id = :id")
        await transaction.execute(ended, {"id": mine.identity.id})
    await reap_peers(house.runtime, mine)
    assert await house.reaped() == set()
