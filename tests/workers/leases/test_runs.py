"""Leases of runs: one trainer a run, a trainer whose lease has passed on writes nothing, clocks need not agree."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import event, func, select, update

from contracts.errors import LeaseLost
from contracts.ids import RunId, SessionId, TenantId
from contracts.ledger_records import Completion, NewOperation, OperationState, ReadyOperation
from contracts.operations import LoraSettings, OperationKind, OptimStep, OptimStepped
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.runtime import Runtime
from ledger.wakeups import Wakeups
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.database_clock import database_now
from store.tables import Operation, Placement, ProcessKind, Run, RunState, WorkerProcess
from telemetry.telemetry import Telemetry
from tenants.run_leases import release_runs
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run
from tests.payloads import digest, stored
from tests.workers.runtimes import lease_moves, make_runtime
from workers.leases.heartbeat import RENEWALS
from workers.leases.processes import alive, declare_dead, new_identity
from workers.leases.runs import RunLeases
from workers.training.lanes import Lanes

BASE = "test/tiny"
LEASE = timedelta(seconds=30)
SHORT = timedelta(seconds=0.4)


@dataclass
class Trainers:
    """Two trainers of one base model, each with a clock of its own, and a tenant with runs."""

    database: Database
    folder: Path
    tenant: TenantId
    session: SessionId
    now: datetime
    skew: dict[str, timedelta] = field(default_factory=dict)
    runtimes: list[Runtime] = field(default_factory=list)

    def ledger(self, name: str = "one") -> Ledger:
        """Return the ledger as the trainer sees it."""
        clock = self.clock(name)
        return Ledger(
            self.database, Wakeups(), clock, Telemetry.of("test", clock), PayloadFiles(DataFolder(self.folder))
        )

    def clock(self, name: str):  # type: ignore[no-untyped-def]
        """Return the trainer's own clock."""
        return lambda: self.now + self.skew.get(name, timedelta(0))

    def leases(self, name: str, *, lease: timedelta = LEASE) -> RunLeases:
        """Return a new trainer's leases."""
        self.runtimes.append(make_runtime(self.database, self.folder, self.clock(name), lease=lease))
        return RunLeases(new_identity(ProcessKind.TRAINER, BASE), self.runtimes[-1])

    async def run(self, number: int, *, has_work: bool = True) -> RunId:
        """Make a ready run, with a pending optimizer step if it ``has_work``."""
        lora = LoraSettings(rank=4, alpha=32.0, seed=1)
        async with self.database.write() as transaction:
            new = NewRun(self.session, number, BASE, lora, None)
            run = await create_run(transaction, self.tenant, new, self.clock("one"))
            await transaction.execute(update(Run).where(Run.id == run).values(state=RunState.READY, next_seq_id=1))
        if has_work:
            await self.accept(run, 1)
        return run

    async def accept(self, run: RunId, seq_id: int, *, trainer: str | None = None) -> None:
        """Accept another step; ``trainer`` is the trainer that the API believes has the run."""
        step = OptimStep()
        new = NewOperation(
            self.tenant, run, seq_id, OperationKind.OPTIM_STEP, BASE, stored(step), digest(step), trainer=trainer
        )
        async with self.database.write() as transaction:
            await self.ledger().accept(transaction, new)

    async def head(self, leases: RunLeases, run: RunId) -> ReadyOperation:
        """Return the run's operation that the trainer would compute now."""
        lanes, ledger = Lanes(), self.ledger()
        async with self.database.read() as session:
            lanes.add_pending(
                await ledger.pending_training(session, BASE, trainer=leases.identity.id, after_position=0)
            )
            lane = lanes.get(run)
            assert lane is not None, "the trainer does not have the run"
            lanes.add_payloads(await ledger.load(session, [one.id for one in lane.to_load(1)]))
        assert lane.head is not None
        return lane.head

    async def finish(self, *heads: ReadyOperation) -> None:
        """Write the steps' results in one transaction."""
        async with self.database.write() as transaction:
            await self.ledger().complete(transaction, [Completion(head, OptimStepped({})) for head in heads])

    async def held(self) -> dict[str | None, int]:
        """Return how many runs each trainer has."""
        async with self.database.read() as session:
            rows = await session.execute(select(Run.trainer_id, func.count().label("runs")).group_by(Run.trainer_id))
            return {row.trainer_id: row.runs for row in rows}

    async def count(self, what) -> int:  # type: ignore[no-untyped-def]
        """Count the rows of a table."""
        async with self.database.read() as session:
            return await session.scalar(select(func.count()).select_from(what)) or 0

    async def expire_all(self) -> None:
        """End every process's lease."""
        async with self.database.write() as transaction:
            await transaction.execute(update(WorkerProcess).values(expires_at=datetime(2000, 1, 1, tzinfo=UTC)))


@pytest_asyncio.fixture
async def trainers(database_url: str, tmp_path: Path) -> AsyncIterator[Trainers]:
    database, now = Database(create_engine(database_url)), datetime.now(UTC)
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name="cats", clock=lambda: now)
        session = await create_session(transaction, tenant, NewSession([], None, "0.38.0", None, None), lambda: now)
    yield Trainers(database, tmp_path, tenant, session, now)
    await database.close()


async def test_runs_that_wait_are_divided_by_load(trainers: Trainers) -> None:
    for number in range(10):
        await trainers.run(number)
    one, two = trainers.leases("one"), trainers.leases("two")
    await asyncio.gather(*(_renew(trainers, leases) for leases in (one, two)))
    await asyncio.gather(one.look(), two.look())
    await asyncio.gather(one.look(), two.look())
    assert await trainers.held() == {one.identity.id: 5, two.identity.id: 5}
    assert await trainers.count(Placement) == 0


async def test_a_trainer_whose_lease_on_a_run_has_passed_on_writes_nothing_of_it(trainers: Trainers) -> None:
    mine, other = await trainers.run(0), await trainers.run(1)
    one = trainers.leases("one")
    await one.look()
    stale, kept = await trainers.head(one, mine), await trainers.head(one, other)
    async with trainers.database.write() as transaction:
        # The run goes to another trainer and comes back: the same trainer, another lease.
        await transaction.execute(update(Run).where(Run.id == mine).values(lease_token=Run.lease_token + 2))
    with pytest.raises(LeaseLost):
        await trainers.finish(stale)
    async with trainers.database.read() as session:
        state = await session.scalar(select(Operation.state).where(Operation.lane == mine))
        next_seq_id = await session.scalar(select(Run.next_seq_id).where(Run.id == mine))
    assert (state, next_seq_id) == (OperationState.PENDING, 1)
    await trainers.finish(kept)


async def test_one_run_without_a_lease_in_a_batch_writes_nothing_of_the_batch(trainers: Trainers) -> None:
    mine, other = await trainers.run(0), await trainers.run(1)
    one = trainers.leases("one")
    await one.look()
    heads = [await trainers.head(one, mine), await trainers.head(one, other)]
    async with trainers.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == mine).values(trainer_id="another"))
    with pytest.raises(LeaseLost):
        await trainers.finish(*heads)
    async with trainers.database.read() as session:
        states = set(await session.scalars(select(Operation.state)))
    assert states == {OperationState.PENDING}


async def test_runs_of_a_dead_trainer_go_to_a_living_one(trainers: Trainers) -> None:
    busy, idle = await trainers.run(0), await trainers.run(1)
    one, two = trainers.leases("one"), trainers.leases("two")
    await one.look()
    await trainers.finish(await trainers.head(one, idle))
    await trainers.expire_all()
    await two.look()
    assert await trainers.held() == {two.identity.id: 1, None: 1}
    assert (await trainers.head(two, busy)).lane == busy
    assert sum(lease_moves(runtime, "expired") for runtime in trainers.runtimes) == 2
    # The idle one has no trainer, and gets one with its next operation.
    await trainers.accept(idle, 2)
    await two.look()
    assert await trainers.held() == {two.identity.id: 2}


async def test_a_trainer_seen_to_end_is_not_waited_for(trainers: Trainers) -> None:
    import os

    run = await trainers.run(0)
    one, two = trainers.leases("one"), trainers.leases("two")
    await one.look()
    await two.look()
    async with trainers.database.write() as transaction:
        # Both are this process; the second one renews at its next look.
        await declare_dead(transaction, os.getpid())
    third = trainers.leases("two")
    await third.look()
    assert (await trainers.head(third, run)).lane == run


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_trainer_cut_off_with_all_the_others_reaps_nobody_at_once(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of the database every lease has ended; the first trainer back must not take the others for dead."""
    run = await trainers.run(0)
    one, two = trainers.leases("one"), trainers.leases("two", lease=SHORT)
    await one.look()
    async with trainers.database.write() as transaction:
        now = await database_now(transaction, trainers.clock("one"))
        await transaction.execute(update(WorkerProcess).values(expires_at=now - timedelta(seconds=1)))
    began = now = 1000.0
    monkeypatch.setattr("workers.leases.heartbeat.monotonic", lambda: now)
    await two.look()
    assert (await trainers.head(one, run)).lane == run
    while await trainers.held() == {one.identity.id: 1}:
        now += SHORT.total_seconds() / RENEWALS
        assert now - began < 10.0
        await two.look()
    assert now - began >= SHORT.total_seconds()
    assert await trainers.held() == {two.identity.id: 1}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("skew", [timedelta(hours=-1), timedelta(hours=1)])
async def test_clock_skew_neither_keeps_the_dead_nor_reaps_the_living(trainers: Trainers, skew: timedelta) -> None:
    run = await trainers.run(0)
    one, two = trainers.leases("one"), trainers.leases("two")
    await one.look()
    trainers.skew["two"] = skew
    await two.look()
    assert await trainers.held() == {one.identity.id: 1}
    async with trainers.database.read() as session:
        for name in ("one", "two"):
            living = await alive(session, ProcessKind.TRAINER, BASE, trainers.clock(name))
            assert set(living) == {one.identity.id, two.identity.id}
    await trainers.finish(await trainers.head(one, run))


async def test_idle_runs_beyond_a_trainers_even_part_go_to_one_that_has_less(trainers: Trainers) -> None:
    runs = [await trainers.run(number) for number in range(4)]
    one, two = trainers.leases("one"), trainers.leases("two")
    await one.look()
    assert await one.releases.surplus() == []
    await two.look()
    assert await one.releases.surplus() == [], "they were busy just now"
    trainers.now += timedelta(minutes=1)
    beyond = await one.releases.surplus()
    assert len(beyond) == 2
    assert set(beyond) < set(runs)
    assert await two.releases.surplus() == []
    # Work that came in the meantime waits for nobody.
    await one.releases.release(beyond)
    await two.look()
    assert await trainers.held() == {one.identity.id: 2, two.identity.id: 2}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_run_that_is_claimed_while_it_is_released_waits_for_no_net(trainers: Trainers) -> None:
    """The operation's placement is the run's only one: a release that finds it writes no other."""
    released, other = await trainers.run(0), await trainers.run(1, has_work=False)
    one, two = trainers.leases("one"), trainers.leases("two")
    await one.look()
    await trainers.accept(released, 2)
    await _renew(trainers, two)
    async with trainers.database.write() as transaction:
        await release_runs(transaction, one.identity.id, [released], trainers.now)
        await trainers.accept(other, 1)
        await two.look()
    await one.look()
    assert await trainers.held() == {one.identity.id: 1, two.identity.id: 1}
    await trainers.finish(await trainers.head(two, other))


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_claim_that_leaves_a_locked_run_looks_again_at_once(trainers: Trainers) -> None:
    """The placement is not announced anew, and the next look by the clock is fifteen seconds away."""
    released = await trainers.run(0)
    one, two = (trainers.leases(name, lease=timedelta(minutes=1)) for name in ("one", "two"))
    await one.look()
    await trainers.accept(released, 2)
    looked = asyncio.Event()

    def note(*given: object) -> None:
        if "FROM runs" in str(given[2]) and "SKIP LOCKED" in str(given[2]):
            looked.set()

    event.listen(trainers.database.engine.sync_engine, "after_cursor_execute", note)
    async with asyncio.timeout(10):
        async with trainers.database.write() as transaction:
            await release_runs(transaction, one.identity.id, [released], trainers.now)
            running = asyncio.create_task(two.run())
            await looked.wait()
            assert await trainers.held() == {one.identity.id: 1}
        while await trainers.held() != {two.identity.id: 1}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    two.stop()
    await running


async def test_runs_that_nobody_asks_for_are_no_load(trainers: Trainers) -> None:
    """A trainer that keeps many forgotten runs gets as many new ones as a trainer with none."""
    forgotten = [await trainers.run(number) for number in range(6)]
    one, two = trainers.leases("one"), trainers.leases("two")
    await one.look()
    await trainers.finish(*[await trainers.head(one, run) for run in forgotten])
    async with trainers.database.write() as transaction:
        await transaction.execute(update(Run).values(last_request_at=trainers.now - timedelta(hours=1)))
    await two.look()
    for number in range(6, 10):
        await trainers.run(number)
    await two.look()
    assert await trainers.held() == {one.identity.id: 6, two.identity.id: 2, None: 2}
    await one.look()
    assert await trainers.held() == {one.identity.id: 8, two.identity.id: 2}


async def test_an_orderly_end_hands_over_at_once(trainers: Trainers) -> None:
    run = await trainers.run(0)
    one, two = trainers.leases("one"), trainers.leases("two")
    await one.look()
    await one.releases.release_all()
    await two.look()
    assert (await trainers.head(two, run)).lane == run


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_trainer_that_ends_counts_for_no_even_part(trainers: Trainers) -> None:
    """The trainer has runs that it saves, as long as its disk takes. Others claim what it has released, and new runs."""
    for number in range(8):
        await trainers.run(number)
    one, two = trainers.leases("one"), trainers.leases("two")
    await asyncio.gather(*(_renew(trainers, leases) for leases in (one, two)))
    await one.look()
    await two.look()
    assert await trainers.held() == {one.identity.id: 4, two.identity.id: 4}
    one.stop_claiming()
    await one.look()
    async with trainers.database.read() as session:
        mine = await session.scalars(select(Run.id).where(Run.trainer_id == one.identity.id))
    await one.releases.release_all_but(mine.all()[:2])
    await trainers.run(8)
    await one.look()
    await two.look()
    assert await trainers.held() == {one.identity.id: 2, two.identity.id: 7}
    third = trainers.leases("two")
    await third.look()
    assert await two.releases.surplus() == [], "they were busy just now"
    trainers.now += timedelta(minutes=1)
    assert len(await two.releases.surplus()) == 3, "the even part of two trainers is four of seven"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_trainer_that_ends_is_told_at_once_and_its_peers_go_on(trainers: Trainers) -> None:
    one, two = (trainers.leases(name, lease=timedelta(hours=1)) for name in ("one", "two"))
    await two.look()
    running = asyncio.create_task(one.run())

    async def takers() -> list[str]:
        async with trainers.database.read() as session:
            return await alive(session, ProcessKind.TRAINER, BASE, trainers.clock("one"), takes_work=True)

    async with asyncio.timeout(60):
        while len(await takers()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        one.stop_claiming()
        while one.identity.id in await takers():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await takers() == [two.identity.id]
    one.stop()
    await running


async def test_an_operation_accepted_for_a_trainer_that_just_died_is_found(trainers: Trainers) -> None:
    run = await trainers.run(0, has_work=False)
    # The API read the run's row before the trainer died, and wrote after it was reaped.
    await trainers.accept(run, 1, trainer="trainer-that-is-gone")
    assert await trainers.count(Placement) == 0
    one = trainers.leases("one")
    await one.look()
    assert (await trainers.head(one, run)).lane == run


async def _renew(trainers: Trainers, leases: RunLeases) -> None:
    from workers.leases.processes import renew

    async with trainers.database.write() as transaction:
        await renew(transaction, leases.identity, lease=LEASE, clock=trainers.clock("one"))
