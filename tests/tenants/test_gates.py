"""Gates on both databases: modes, takeovers, expiry, and no sample starts behind a committed pause."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from contracts.errors import InvalidRequest
from contracts.ids import RequestId, RunId, TenantId
from store.database import Database, create_engine
from tenants.gates import (
    Dispatch,
    Entry,
    Flight,
    Gate,
    GateMode,
    Pause,
    clear_all_in_flight,
    clear_in_flight,
    closed_gates,
    flights_of,
    gate_of,
    in_flight,
    make_gates,
    mark_in_flight,
    open_expired,
    pause_gate,
    pool_gate,
    resume_gate,
)
from tenants.tenant_names import create_tenant

BASE = "weft/tiny"
CAT, DOG = RunId("a:train:0"), RunId("b:train:0")


@dataclass
class Gates:
    """Two tenants' gates and a clock that the test moves."""

    database: Database
    tenant: TenantId
    other: TenantId
    now: datetime
    cache_clears: int = 0
    """Value of the latest sample that was marked as in flight."""

    def clock(self) -> datetime:
        """Return the time that the test set."""
        return self.now

    async def pause(
        self,
        key: str,
        mode: GateMode,
        *,
        ttl: timedelta = timedelta(hours=1),
        reason: str | None = None,
        clear_cache: bool = False,
    ) -> Gate:
        """Close a gate."""
        async with self.database.write() as transaction:
            return await pause_gate(
                transaction,
                key,
                tenant=self.tenant,
                base_model=BASE,
                pause=Pause(mode, reason, ttl, clear_cache),
                clock=self.clock,
            )

    async def resume(self, key: str, generation: int | None = None) -> Gate:
        """Open a gate."""
        async with self.database.write() as transaction:
            return await resume_gate(transaction, key, generation=generation, clock=self.clock)

    async def gate(self, key: str) -> Gate:
        """Return the gate's state."""
        async with self.database.read() as session:
            return await gate_of(session, key, self.clock)

    async def mark_in_flight(
        self, operation: str, run: RunId | None, replica: str = "one", process: str = "here"
    ) -> bool:
        """Try to mark a sample as in flight."""
        tenant = self.other if run == DOG else self.tenant
        dispatch = Dispatch(RequestId(operation), tenant, BASE, run, "v1" if run else None, replica, process)
        async with asyncio.timeout(60):
            while True:
                async with self.database.write() as transaction:
                    (entered,) = await mark_in_flight(transaction, [dispatch], self.clock)
                    entry, self.cache_clears = entered.entry, entered.cache_clears
                    if entry is Entry.MISSING:
                        await make_gates(transaction, dispatch, self.clock)
                if entry in (Entry.IN_FLIGHT, Entry.CLOSED):
                    return entry is Entry.IN_FLIGHT

    async def count(self, key: str) -> int:
        """Count the samples in flight behind the gate."""
        async with self.database.read() as session:
            return await in_flight(session, key)


@pytest.fixture
async def gates(database_url: str) -> AsyncIterator[Gates]:
    database = Database(create_engine(database_url))
    now = datetime(2026, 11, 1, tzinfo=UTC)
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name="one", clock=lambda: now)
        other = await create_tenant(transaction, name="two", clock=lambda: now)
    yield Gates(database, tenant, other, now)
    await database.close()


async def test_a_paused_adapter_lets_nobody_in_and_its_neighbour_goes_on(gates: Gates) -> None:
    assert await gates.gate(CAT) == Gate()
    paused = await gates.pause(CAT, GateMode.KEEP, reason="swap")
    assert (paused.generation, paused.mode, paused.reason, paused.since) == (1, GateMode.KEEP, "swap", gates.now)
    assert not await gates.mark_in_flight("1", CAT)
    assert await gates.mark_in_flight("2", DOG)
    assert await gates.mark_in_flight("3", None)
    await gates.resume(CAT)
    assert await gates.mark_in_flight("1", CAT)
    assert (await gates.count(CAT), await gates.count(DOG), await gates.count(pool_gate(BASE))) == (1, 1, 3)


async def test_a_paused_pool_lets_nobody_in(gates: Gates) -> None:
    await gates.pause(pool_gate(BASE), GateMode.WAIT)
    assert not await gates.mark_in_flight("1", CAT)
    assert not await gates.mark_in_flight("2", DOG)
    assert not await gates.mark_in_flight("3", None)
    await gates.resume(pool_gate(BASE))
    assert await gates.mark_in_flight("1", CAT)


async def test_a_pause_that_clears_the_cache_is_told_to_its_samples_only(gates: Gates) -> None:
    async def clears(run: RunId | None) -> int:
        assert await gates.mark_in_flight("1", run)
        return gates.cache_clears

    for key, clear_cache, expected in (
        (CAT, False, (0, 0, 0)),
        (CAT, True, (1, 0, 0)),
        (pool_gate(BASE), False, (1, 0, 0)),
        (pool_gate(BASE), True, (2, 1, 1)),
        (CAT, True, (3, 1, 1)),
    ):
        await gates.pause(key, GateMode.KEEP, clear_cache=clear_cache)
        await gates.resume(key)
        assert (await clears(CAT), await clears(DOG), await clears(None)) == expected


async def test_pausing_what_is_paused_takes_it_over(gates: Gates) -> None:
    first = await gates.pause(CAT, GateMode.WAIT, ttl=timedelta(seconds=60), reason="one")
    gates.now += timedelta(seconds=1)
    second = await gates.pause(CAT, GateMode.ABORT, reason="two")
    assert (second.generation, second.mode, second.reason, second.expires_at) == (
        2,
        GateMode.ABORT,
        "two",
        gates.clock() + timedelta(hours=1),
    )
    assert second.since == first.since
    with pytest.raises(InvalidRequest, match="another controller"):
        await gates.resume(CAT, generation=first.generation)
    assert (await gates.gate(CAT)).mode is GateMode.ABORT
    assert (await gates.resume(CAT, generation=second.generation)).mode is None


async def test_resuming_what_is_open_changes_nothing(gates: Gates) -> None:
    assert await gates.resume(CAT) == Gate()
    await gates.pause(CAT, GateMode.KEEP)
    opened = await gates.resume(CAT)
    assert opened == Gate(generation=2)
    assert await gates.resume(CAT) == opened


async def test_a_pause_expires_by_itself(gates: Gates) -> None:
    await gates.pause(CAT, GateMode.KEEP, ttl=timedelta(seconds=30))
    await gates.pause(DOG, GateMode.KEEP)
    assert not await gates.mark_in_flight("1", CAT)
    gates.now += timedelta(seconds=31)
    assert (await gates.gate(CAT)).mode is None
    assert await gates.mark_in_flight("1", CAT)
    async with gates.database.read() as session:
        assert set(await closed_gates(session, BASE, gates.clock)) == {DOG}
    async with gates.database.write() as transaction:
        assert await open_expired(transaction, gates.clock) == [(CAT, BASE)]
    assert (await gates.gate(CAT)).generation == 2
    assert (await gates.gate(DOG)).mode is GateMode.KEEP


async def test_a_dead_process_leaves_nothing_in_flight(gates: Gates) -> None:
    await gates.mark_in_flight("1", CAT, process="dead")
    await gates.mark_in_flight("2", CAT, replica="two", process="alive")
    async with gates.database.read() as session:
        flights = await flights_of(session, [CAT, DOG])
    assert flights == [Flight(CAT, "one", "v1", 1), Flight(CAT, "two", "v1", 1)]
    async with gates.database.write() as transaction:
        await clear_all_in_flight(transaction, "dead")
    assert await gates.count(CAT) == 1
    async with gates.database.write() as transaction:
        assert await clear_in_flight(transaction, [RequestId("1"), RequestId("2")], "alive") == {"2"}
    assert await gates.count(CAT) == 0


async def test_whoever_entered_before_a_pause_is_counted_by_it(gates: Gates) -> None:
    """Pause while samples start: each sample is either refused, or in flight when the pause has committed."""
    for attempt in range(10):
        names = [f"{attempt}.{number}" for number in range(6)]
        entering = [asyncio.create_task(gates.mark_in_flight(name, CAT)) for name in names[:3]]
        paused = asyncio.create_task(gates.pause(CAT, GateMode.WAIT))
        entering += [asyncio.create_task(gates.mark_in_flight(name, CAT)) for name in names[3:]]
        await paused
        seen = await gates.count(CAT)
        entered = sum(await asyncio.gather(*entering))
        assert await gates.count(CAT) == seen == entered
        async with gates.database.write() as transaction:
            await clear_all_in_flight(transaction, "here")
        await gates.resume(CAT)
