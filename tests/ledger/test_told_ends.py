"""Ends of samples are told once each, in whatever order the transactions that write them end."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest_asyncio
from sqlalchemy import delete

from contracts.errors import EngineFailure, WeftError
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import Completion, NewOperation, ReadyOperation
from contracts.operations import OperationKind, SampledSequence, SampleOutput, SampleRequest
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.told_ends import ToldEnd, ends_after
from ledger.wakeups import Wakeups, ended_samples_topic
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.tables import Operation
from telemetry.telemetry import Telemetry
from tenants.tenant_names import create_tenant
from tests.ledger_heads import pending_samples
from tests.payloads import digest, stored

BASE = "test/tiny"
DRAWN = SampleOutput([SampledSequence("stop", np.array([7], np.int32), np.array([-0.5], np.float32))])


@dataclass
class MovableClock:
    now: datetime = field(default_factory=lambda: datetime(2026, 1, 1, tzinfo=UTC))

    def __call__(self) -> datetime:
        return self.now


@dataclass
class Bench:
    """A ledger with two tenants."""

    database: Database
    ledger: Ledger
    wakeups: Wakeups
    clock: MovableClock
    cats: TenantId
    dogs: TenantId

    async def accept(self, tenant: TenantId, lane: str, seq_id: int) -> ReadyOperation:
        payload = SampleRequest(prompt=np.array([1, 2], np.int64))
        new = NewOperation(tenant, lane, seq_id, OperationKind.SAMPLE, BASE, stored(payload), digest(payload))
        async with self.database.write() as transaction:
            await self.ledger.accept(transaction, new)
        async with self.database.read() as session:
            return next(one for one in await pending_samples(self.ledger, session, BASE) if one.id == new.id)

    async def finish(self, *operations: ReadyOperation, outcome: SampleOutput | WeftError = DRAWN) -> None:
        async with self.database.write() as transaction:
            await self.ledger.complete(transaction, [Completion(one, outcome) for one in operations])

    async def told(self, tenant: TenantId, lane: str, after: int) -> list[ToldEnd]:
        return await ends_after(self.database, tenant, lane, after, self.clock)


async def opened(url: str, folder: Path) -> Bench:
    database, wakeups, clock = Database(create_engine(url)), Wakeups(), MovableClock()
    ledger = Ledger(database, wakeups, clock, Telemetry.of("test", clock), PayloadFiles(DataFolder(folder)))
    async with database.write() as transaction:
        cats = await create_tenant(transaction, name="cats", clock=clock)
        dogs = await create_tenant(transaction, name="dogs", clock=clock)
    return Bench(database, ledger, wakeups, clock, cats, dogs)


@pytest_asyncio.fixture
async def bench(database_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    found = await opened(database_url, tmp_path)
    yield found
    await found.database.close()


@pytest_asyncio.fixture
async def on_postgres(migrated_postgres_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    found = await opened(migrated_postgres_url, tmp_path)
    yield found
    await found.database.close()


def ids(told: list[ToldEnd]) -> list[RequestId]:
    return [end.id for end in told]


async def test_an_end_whose_transaction_commits_late_is_told_after_those_that_overtook_it(on_postgres: Bench) -> None:
    """Two writers: the first writes first and commits last, while a poll has told the second's end already."""
    bench = on_postgres
    slow, fast = [await bench.accept(bench.cats, "cats:sample:0", number) for number in range(2)]
    other = await bench.accept(bench.dogs, "dogs:sample:0", 0)
    async with bench.database.write() as first:
        await bench.ledger.complete(first, [Completion(slow, DRAWN)])
        await bench.finish(fast)
        told = await bench.told(bench.cats, "cats:sample:0", 0)
        assert ids(told) == [fast.id]
    later = await bench.told(bench.cats, "cats:sample:0", told[-1].number)
    assert ids(later) == [slow.id]
    assert later[0].number > told[0].number
    assert await bench.told(bench.dogs, "dogs:sample:0", 0) == []
    await bench.finish(other)
    assert ids(await bench.told(bench.dogs, "dogs:sample:0", 0)) == [other.id]


async def test_a_repeated_look_tells_the_same_under_the_same_numbers(bench: Bench) -> None:
    samples = [await bench.accept(bench.cats, "lane", number) for number in range(3)]
    await bench.finish(samples[0])
    first = await bench.told(bench.cats, "lane", 0)
    await bench.finish(samples[1], outcome=EngineFailure("no"))
    await bench.finish(samples[2])
    every = await bench.told(bench.cats, "lane", 0)
    assert every[:1] == first
    assert sorted(ids(every)) == sorted(one.id for one in samples)
    assert [end.is_done for end in sorted(every, key=lambda end: end.seq_id)] == [True, False, True]
    assert await bench.told(bench.cats, "lane", every[0].number) == every[1:]
    assert await bench.told(bench.cats, "lane", every[-1].number) == []


async def test_a_number_stays_above_those_of_rows_that_are_forgotten(bench: Bench) -> None:
    await bench.finish(await bench.accept(bench.cats, "lane", 0))
    cursor = (await bench.told(bench.cats, "lane", 0))[-1].number
    async with bench.database.write() as transaction:
        await transaction.execute(delete(Operation))
    bench.clock.now += timedelta(days=2)
    copy = await bench.accept(bench.cats, "lane", 1_000_000_000)
    await bench.finish(copy)
    # Another copy of the client, which has been told nothing yet, looks first.
    assert ids(await bench.told(bench.cats, "lane", 0)) == [copy.id]
    assert ids(await bench.told(bench.cats, "lane", cursor)) == [copy.id]


async def test_another_tenant_is_told_nothing_of_the_lane_and_numbers_nothing(bench: Bench) -> None:
    await bench.finish(await bench.accept(bench.cats, "lane", 0))
    assert await bench.told(bench.dogs, "lane", 0) == []
    assert len(await bench.told(bench.cats, "lane", 0)) == 1


async def test_every_end_of_a_sample_wakes_the_polls_of_its_lane(bench: Bench) -> None:
    mine, other = await bench.accept(bench.cats, "lane", 0), await bench.accept(bench.dogs, "other", 0)
    with (
        bench.wakeups.listen(ended_samples_topic("lane")) as woken,
        bench.wakeups.listen(ended_samples_topic("other")) as undisturbed,
    ):
        await bench.finish(mine)
        assert woken.is_set()
        assert not undisturbed.is_set()
        await bench.finish(other)
        assert undisturbed.is_set()
