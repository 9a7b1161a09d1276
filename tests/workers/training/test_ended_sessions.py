"""Runs whose session has ended leave their trainer: those without work at once, the others once their work has ended."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import update

from contracts.operations import OptimStepped
from store.clock import utc_now
from store.repeat import wait_for
from store.tables import Session
from tenants.run_history import RunEventKind
from tenants.suspensions import resume_tenant, suspend_tenant
from tests.workers.training.conftest import DEADLINE, Client, NewRig, Rig
from tests.workers.training.test_directives import kinds, trainer_of
from tests.workers.training.test_worker import STEP, batch
from workers.housekeeping.schedule import StepName
from workers.housekeeping.steps import HousekeepingSteps


@pytest.fixture(autouse=True)
def short_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the worker sweep often."""
    monkeypatch.setattr("workers.training.worker.SWEEP_SECONDS", 0.05)


async def end_session(rig: Rig, client: Client, *, ago: timedelta = timedelta()) -> None:
    """End the client's session as it was that long ago."""
    async with rig.database.write() as transaction:
        ended = update(Session).where(Session.id == client.session)
        await transaction.execute(ended.values(ended_at=utc_now() - ago, end_reason="silent"))


@asynccontextmanager
async def counted_sweeps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[], int]]:
    """Count the worker's sweeps meanwhile."""
    sweeps, surplus = 0, rig.worker.leases.releases.surplus

    async def counting() -> list[str]:
        nonlocal sweeps
        sweeps += 1
        return list(await surplus())

    with monkeypatch.context() as patched:
        patched.setattr(rig.worker.leases.releases, "surplus", counting)
        yield lambda: sweeps


async def test_a_run_whose_work_is_held_stays_with_its_trainer_and_others_leave(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its trainer it would be placed, claimed and released again with every sweep."""
    rig = new_rig()
    async with rig.running():
        held, other = await rig.clients("held", "other")
        for client in (held, other):
            await client.do(batch(1))
        async with rig.database.write() as transaction:
            await suspend_tenant(transaction, name="held", reason="unpaid", now=utc_now())
            waiting = await held.accept(transaction, STEP)
        await rig.worker.leases.look()
        for client in (held, other):
            await end_session(rig, client)
        async with asyncio.timeout(2 * DEADLINE), counted_sweeps(rig, monkeypatch) as sweeps:
            while sweeps() < 10 or await trainer_of(rig, other) is not None:
                await wait_for(asyncio.Event(), 0.02)
                await rig.worker.leases.look()
        assert await kinds(rig, held) == [RunEventKind.CLAIMED]
        assert await kinds(rig, other) == [RunEventKind.CLAIMED, RunEventKind.RELEASED]
        async with rig.database.write() as transaction:
            await resume_tenant(transaction, name="held", now=utc_now())
        await rig.worker.leases.look()
        assert isinstance(await held.result(waiting), OptimStepped)


async def test_a_run_whose_work_was_ended_with_it_leaves_memory_and_its_trainer(new_rig: NewRig) -> None:
    """The work waits behind a hole, as it would for a budget. A run of an open session keeps its own."""
    rig = new_rig()
    async with rig.running():
        ended, other = await rig.clients("ended", "other")
        for client in (ended, other):
            await client.do(batch(1))
        ends, waits = [await client.send(STEP, seq_id=client.seq_id + 2) for client in (ended, other)]
        lanes = rig.worker._lanes
        async with asyncio.timeout(2 * DEADLINE):
            while not all(lane is not None and lane.has_hole for lane in (lanes.get(ended.run), lanes.get(other.run))):
                await wait_for(asyncio.Event(), 0.02)
        await end_session(rig, ended, ago=timedelta(days=2))
        await HousekeepingSteps(rig.runtime, lambda: True).by_name[StepName.END_RUNS].work(None)
        assert not await ended.is_pending(ends)
        async with asyncio.timeout(2 * DEADLINE):
            while await trainer_of(rig, ended) is not None:
                await wait_for(asyncio.Event(), 0.02)
        assert lanes.get(ended.run) is None
        assert not rig.residency.holds(ended.run)
        assert await other.is_pending(waits)
        other.seq_id += 1
        await other.result(await other.send(batch(2), seq_id=other.seq_id))
        assert isinstance(await other.result(waits), OptimStepped)
        assert await trainer_of(rig, other) is not None
