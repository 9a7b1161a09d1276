"""The runs and samples of forsaken processes are released; processes that live, or may live, keep theirs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from sqlalchemy import func, select, text, update

from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import NewOperation, OperationState
from contracts.operations import LoraSettings, OperationKind, OptimStep, SampleRequest
from ledger.ledger import Ledger
from ledger.runtime import Runtime
from ledger.sample_claims import claim_samples
from ledger.wakeups import Wakeups, operation_topic
from ledger.work_in_hand import WorkInHand
from store.database import Database, create_engine
from store.database_clock import database_now
from store.tables import (
    EndedProcess,
    Operation,
    Placement,
    ProcessKind,
    Run,
    RunState,
    VersionCommand,
    WorkerProcess,
)
from telemetry.telemetry import Telemetry
from tenants.ended_processes import EndedStanding, TakeOver, list_ended
from tenants.gates import Dispatch, Entry, in_flight, make_gates, mark_in_flight, pool_gate
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from tenants.trainers import RECORDS, drain_trainer, list_trainers, undrain_trainer
from testing.runs import create_run
from tests.payloads import digest, stored
from tests.workers.runtimes import lease_moves, make_runtime
from workers.housekeeping.schedule import StepName
from workers.housekeeping.steps import HousekeepingSteps
from workers.leases.heartbeat import RENEWALS
from workers.leases.processes import WorkerIdentity, new_identity, remove_processes, renew
from workers.leases.reaper import reap_forsaken, reap_trainers
from workers.leases.runs import RunLeases

GONE, KEPT = "test/gone", "test/kept"
LEASE = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Base:
    """A tenant's work on a base model, and the trainer and the pool that have it."""

    trainer: WorkerIdentity
    pool: WorkerIdentity
    run: RunId
    sample: RequestId


@dataclass
class House:
    """Two base models, each with processes and a tenant of its own."""

    database: Database
    now: datetime
    runtime: Runtime = field(init=False)
    bases: dict[str, Base] = field(default_factory=dict)

    def clock(self) -> datetime:
        """Return the time that the test set."""
        return self.now

    async def sweep(self, *, may_declare_dead: bool = True) -> None:
        """Reap the forsaken, as housekeeping does."""
        await reap_forsaken(self.runtime, may_declare_dead=lambda: may_declare_dead)

    async def open(self, base_model: str, tenant_name: str) -> None:
        """Open a base model: a trainer with a run, and a pool with a sample and a version command."""
        trainer, pool = (new_identity(kind, base_model) for kind in (ProcessKind.TRAINER, ProcessKind.POOL))
        ledger = Ledger(
            self.database,
            Wakeups(),
            self.clock,
            Telemetry.of("test", self.clock),
            self.runtime.ledger.payloads,
        )
        step, request = OptimStep(), SampleRequest(np.arange(4, dtype=np.int64))
        async with self.database.write() as transaction:
            tenant = await create_tenant(transaction, name=tenant_name, clock=self.clock)
            new = NewSession([], None, "0.38.0", None, None)
            session = await create_session(transaction, tenant, new, self.clock)
            lora = LoraSettings(rank=4, alpha=32.0, seed=1)
            run = await create_run(transaction, tenant, NewRun(session, 0, base_model, lora, None), self.clock)
            for identity in (trainer, pool):
                await renew(transaction, identity, lease=LEASE, clock=self.clock)
            await transaction.execute(
                update(Run)
                .where(Run.id == run)
                .values(state=RunState.READY, next_seq_id=1, trainer_id=trainer.id, lease_token=7)
            )
            train = NewOperation(
                tenant, run, 1, OperationKind.OPTIM_STEP, base_model, stored(step), digest(step), trainer=trainer.id
            )
            await ledger.accept(transaction, train)
            lane = run.replace(":train:", ":sample:")
            sample = await ledger.accept(
                transaction,
                NewOperation(tenant, lane, 1, OperationKind.SAMPLE, base_model, stored(request), digest(request)),
            )
            await claim_samples(transaction, [sample], process=pool.id)
            await self._mark_in_flight(transaction, sample, tenant, base_model, pool.id)
            transaction.add(
                VersionCommand(id=pool.id, process_id=pool.id, kind="withdraw", version="v", created_at=self.now)
            )
        self.bases[base_model] = Base(trainer, pool, run, sample)

    async def _mark_in_flight(self, transaction, sample, tenant: TenantId, base_model: str, process: str) -> None:  # type: ignore[no-untyped-def]
        dispatch = Dispatch(sample, tenant, base_model, None, None, "vllm-0", process)
        await make_gates(transaction, dispatch, self.clock)
        (entered,) = await mark_in_flight(transaction, [dispatch], self.clock)
        assert entered.entry is Entry.IN_FLIGHT

    async def end(self, base_model: str, *, ago: timedelta) -> None:
        """Have the leases of the base's processes end ``ago`` before now."""
        async with self.database.write() as transaction:
            now = await database_now(transaction, self.clock)
            await transaction.execute(
                update(WorkerProcess).where(WorkerProcess.base_model == base_model).values(expires_at=now - ago)
            )

    async def has_all(self, base_model: str) -> bool:
        """Return whether trainer and pool still have all that they had; fail when they have only some of it."""
        one = self.bases[base_model]
        async with self.database.read() as session:
            counts = [
                await session.scalar(select(func.count()).select_from(WorkerProcess).where(WorkerProcess.id == owner))
                for owner in (one.trainer.id, one.pool.id)
            ]
            counts += [
                await session.scalar(select(func.count()).select_from(Run).where(Run.trainer_id == one.trainer.id)),
                await session.scalar(
                    select(func.count()).select_from(Operation).where(Operation.taken_by == one.pool.id)
                ),
                await in_flight(session, pool_gate(base_model)),
                await session.scalar(
                    select(func.count()).select_from(VersionCommand).where(VersionCommand.process_id == one.pool.id)
                ),
            ]
        assert counts in ([1] * 6, [0] * 6)
        return counts[0] == 1


@pytest_asyncio.fixture
async def house(database_url: str, tmp_path: Path) -> AsyncIterator[House]:
    made = House(Database(create_engine(database_url)), datetime.now(UTC))
    made.runtime = make_runtime(made.database, tmp_path, made.clock, lease=LEASE)
    await made.open(GONE, "cats")
    await made.open(KEPT, "dogs")
    yield made
    await made.database.close()


async def test_what_the_forsaken_had_is_free_again(house: House) -> None:
    await house.end(GONE, ago=11 * LEASE)
    await house.sweep()
    assert (await house.has_all(GONE), await house.has_all(KEPT)) == (False, True)
    gone, kept = house.bases[GONE], house.bases[KEPT]
    async with house.database.read() as session:
        tokens = {row.id: row.lease_token for row in await session.execute(select(Run.id, Run.lease_token))}
        placed = list(await session.scalars(select(Placement.run_id)))
    assert tokens == {gone.run: 8, kept.run: 7}
    assert placed == [gone.run]
    assert lease_moves(house.runtime, "expired") == 1


async def test_clients_hear_of_what_a_trainer_ended_before_it_died(house: House) -> None:
    """The results are written, and nobody was told."""
    ended: dict[str, str] = {}
    async with house.database.write() as transaction:
        for name, base in house.bases.items():
            which = (Operation.lane == base.run, Operation.seq_id == 1)
            done = update(Operation).where(*which).values(state=OperationState.DONE, finished_at=house.now)
            ended[name] = (await transaction.scalars(done.returning(Operation.id))).one()
            await transaction.execute(update(Run).where(Run.id == base.run).values(next_seq_id=2))
    await house.end(GONE, ago=11 * LEASE)
    listen = house.runtime.wakeups.listen
    with listen(operation_topic(ended[GONE])) as told, listen(operation_topic(ended[KEPT])) as beside:
        await house.sweep()
        assert (told.is_set(), beside.is_set()) == (True, False)


async def test_a_process_that_may_still_come_back_keeps_what_it_has(house: House) -> None:
    await house.end(GONE, ago=9 * LEASE)
    await house.sweep()
    assert await house.has_all(GONE)


async def test_a_process_that_was_cut_off_itself_reaps_nobody(house: House) -> None:
    await house.end(GONE, ago=11 * LEASE)
    await house.end(KEPT, ago=11 * LEASE)
    await house.sweep(may_declare_dead=False)
    assert await house.has_all(GONE)
    assert await house.has_all(KEPT)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_trainer_may_declare_others_dead_once_it_has_lived_for_a_whole_lease(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, now = timedelta(seconds=0.4), 1000.0
    monkeypatch.setattr("workers.leases.heartbeat.monotonic", lambda: now)
    runtime = make_runtime(house.database, tmp_path, house.clock, lease=lease)
    leases = RunLeases(new_identity(ProcessKind.TRAINER, KEPT), runtime)
    assert not leases.may_declare_dead
    await leases.look()
    for _ in range(RENEWALS):
        assert not leases.may_declare_dead
        now += lease.total_seconds() / RENEWALS
        await leases.look()
    assert leases.may_declare_dead


async def ended(house: House) -> dict[str, EndedStanding]:
    """Return the processes of which is told that they died."""
    async with house.database.read() as session:
        return {one.id: one for one in await list_ended(session, since=house.now - timedelta(hours=1))}


async def test_the_dead_are_told_with_what_they_held_and_who_has_it_now(house: House) -> None:
    await house.end(GONE, ago=11 * LEASE)
    await house.sweep()
    gone, kept = house.bases[GONE], house.bases[KEPT]
    told = await ended(house)
    assert told.keys() == {gone.trainer.id, gone.pool.id}
    assert (told[gone.trainer.id].runs, told[gone.trainer.id].taken_over) == (1, [TakeOver(None, 1)])
    assert (told[gone.pool.id].samples, told[gone.pool.id].taken_over) == (1, ())
    async with house.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == gone.run).values(trainer_id=kept.trainer.id))
    assert (await ended(house))[gone.trainer.id].taken_over == [TakeOver(kept.trainer.id, 1)]


async def test_a_process_that_dies_twice_is_told_once_and_ends_in_order_untold(house: House) -> None:
    gone = house.bases[GONE]
    for _ in range(2):
        await house.end(GONE, ago=11 * LEASE)
        await house.sweep()
        async with house.database.write() as transaction:
            await renew(transaction, gone.trainer, lease=LEASE, clock=house.clock)
    assert (await ended(house))[gone.trainer.id].runs == 0
    async with house.database.write() as transaction:
        await remove_processes(transaction, [house.bases[KEPT].trainer.id])
    assert house.bases[KEPT].trainer.id not in await ended(house)


async def test_a_drain_outlives_the_row_of_a_trainer_that_was_taken_for_dead(house: House) -> None:
    """Neither does another trainer get it, nor does one come back whose drain an operator has ended."""
    gone, kept = (house.bases[name].trainer for name in (GONE, KEPT))

    async def lapse() -> dict[str, tuple[datetime | None, str | None]]:
        """Have both trainers taken for dead and come back; return the drain of each."""
        for base_model in (GONE, KEPT):
            await house.end(base_model, ago=11 * LEASE)
        await house.sweep()
        async with house.database.write() as transaction:
            for trainer in (gone, kept):
                await renew(transaction, trainer, lease=LEASE, clock=house.clock)
        async with house.database.read() as session:
            return {one.id: (one.drained_at, one.reason) for one in await list_trainers(session, house.clock)}

    async with house.database.write() as transaction:
        await drain_trainer(transaction, gone.id, reason="maintenance", now=house.now)
    for _ in range(2):
        assert await lapse() == {gone.id: (house.now, "maintenance"), kept.id: (None, None)}
    async with house.database.write() as transaction:
        await undrain_trainer(transaction, gone.id)
    assert await lapse() == {gone.id: (None, None), kept.id: (None, None)}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_trainer_that_renews_while_it_is_reaped_is_drained_still(house: House) -> None:
    gone = house.bases[GONE].trainer

    async def come_back() -> None:
        async with house.database.write() as transaction:
            await renew(transaction, gone, lease=LEASE, clock=house.clock)

    async def is_waiting() -> bool:
        async with house.database.read() as session:
            here = "datname = current_database() AND wait_event_type = 'Lock'"
            return bool(await session.scalar(text(f"SELECT count(*) FROM pg_stat_activity WHERE {here}")))

    async with asyncio.timeout(60):
        async with house.database.write() as reaping:
            await drain_trainer(reaping, gone.id, reason="maintenance", now=house.now)
            await reap_trainers(reaping, [gone.id], house.runtime)
            renewing = asyncio.create_task(come_back())
            while not await is_waiting():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await renewing
    async with house.database.read() as session:
        drains = {one.id: one.reason for one in await list_trainers(session, house.clock)}
    assert drains == {gone.id: "maintenance", house.bases[KEPT].trainer.id: None}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_the_record_of_a_trainer_that_was_taken_for_dead_and_lives_is_kept_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work in hand at each death counts one attempt, and no attempt more when the trainer dies again."""
    now, work, trainer = 1000.0, WorkInHand(), house.bases[GONE].trainer
    monkeypatch.setattr("workers.leases.heartbeat.monotonic", lambda: now)
    leases = RunLeases(trainer, house.runtime)
    leases.on_row(partial(work.open, house.runtime.data_folder, trainer.id))
    folder = house.runtime.data_folder.path(f"{RECORDS}/{trainer.id}")
    assert not folder.exists(), "a trainer without a row leaves no folder"
    async with house.database.read() as session:
        steps = select(Operation.id, Operation.lane).where(Operation.kind == OperationKind.OPTIM_STEP)
        of_run = {row.lane: RequestId(row.id) for row in await session.execute(steps)}
    early, late = (of_run[house.bases[name].run] for name in (GONE, KEPT))

    async def die() -> list[int]:
        await house.end(GONE, ago=11 * LEASE)
        await house.sweep()
        async with house.database.read() as session:
            rows = await session.execute(select(Operation.id, Operation.attempts))
            attempts = {row.id: row.attempts for row in rows}
        return [attempts[early], attempts[late]]

    await leases.look()
    with work.holding([early]):
        assert await die() == [1, 0]
        now += LEASE.total_seconds()
        await leases.look()
        assert work, "it is in hand still"
        with work.holding([late]):
            assert await die() == [1, 1]
    assert not work
    work.close()


async def test_old_deaths_are_forgotten_and_late_ones_stay(house: House) -> None:
    for base_model in (GONE, KEPT):
        await house.end(base_model, ago=11 * LEASE)
    await house.sweep()
    old = house.bases[GONE].trainer.id
    async with house.database.write() as transaction:
        long_ago = house.now - timedelta(days=31)
        await transaction.execute(update(EndedProcess).where(EndedProcess.id == old).values(ended_at=long_ago))
    steps = HousekeepingSteps(house.runtime, lambda: True)
    await steps.by_name[StepName.FORGET_EVENTS].work(None)
    async with house.database.read() as session:
        left = set(await session.scalars(select(EndedProcess.id)))
    assert (old in left, len(left)) == (False, 3)
