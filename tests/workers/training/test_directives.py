"""Operators move, evict and drain while tenants train: weights are as if nothing had happened, and others notice nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta

import torch
from sqlalchemy import select

from contracts.operations import OptimStep, TrainingBatch
from engine.model.base import BaseModel
from ledger.wakeups import Wakeups
from store.clock import utc_now
from store.repeat import wait_for
from store.tables import Run
from tenants.run_directives import RunDirective, direct_run, standing_directive
from tenants.run_history import RunEventKind, run_history
from tenants.suspensions import resume_tenant, suspend_tenant
from tenants.trainers import drain_trainer, find_trainer, list_trainers, undrain_trainer
from tests.workers.training.conftest import DEADLINE, Client, NewRig, Rig, undisturbed
from tests.workers.training.test_worker import STEP, batch


async def until(seen: Callable[[], Awaitable[object]]) -> None:
    """Wait until ``seen`` returns something true."""
    async with asyncio.timeout(5 * DEADLINE):
        while not await seen():
            await wait_for(asyncio.Event(), 0.02)


async def kinds(rig: Rig, client: Client) -> list[RunEventKind]:
    """Return the kinds of the run's events, the oldest first."""
    async with rig.database.read() as session:
        return [event.kind for event in reversed(await run_history(session, client.run))]


async def trainer_of(rig: Rig, client: Client) -> str | None:
    """Return the trainer that leases the client's run."""
    async with rig.database.read() as session:
        found: str | None = await session.scalar(select(Run.trainer_id).where(Run.id == client.run))
        return found


def assert_undisturbed(rig: Rig, base: BaseModel, client: Client, seeds: Iterable[int]) -> None:
    """Check that the adapter is bit for bit what an undisturbed trainer would have made of a step for each seed."""
    done: list[TrainingBatch | OptimStep] = [payload for seed in seeds for payload in (batch(seed), STEP)]
    expected = undisturbed(base, client.lora, done)
    assert torch.equal(rig.trainer.state(client.run).weights.vector, expected.weights.vector)


async def steps(client: Client, seeds: Iterable[int]) -> None:
    """Make a training step for each seed."""
    for seed in seeds:
        await client.do(batch(seed))
        await client.do(STEP)


async def test_a_suspended_tenants_work_waits_and_goes_on_bit_for_bit(new_rig: NewRig, base: BaseModel) -> None:
    rig = new_rig()
    async with rig.running():
        held, other = await rig.clients("held", "other")
        await steps(held, [1])
        async with rig.database.write() as transaction:
            known = [await held.accept(transaction, payload) for payload in (batch(2), STEP)]
            await suspend_tenant(transaction, name="held", reason="unpaid", now=utc_now())
        await rig.worker.leases.look()
        late = await held.send(batch(3))
        await steps(other, range(1, 4))
        assert await held.is_pending(late)
        async with rig.database.write() as transaction:
            await resume_tenant(transaction, name="held", now=utc_now())
        await rig.worker.leases.look()
        for request in (*known, late):
            await held.result(request)
        await held.do(STEP)
        assert_undisturbed(rig, base, held, [1, 2, 3])
        assert_undisturbed(rig, base, other, [1, 2, 3])


async def test_an_operation_begun_before_a_suspension_ends(new_rig: NewRig) -> None:
    """The operation takes several passes: its tenant's other work waits, and its own sequences must not be left lying."""
    rig = new_rig(token_budget=16)
    async with rig.running():
        held, other = await rig.clients("held", "other")
        long = await held.send(batch(1, (8,) * 12))
        await until(lambda: _true(rig.counts.passes))
        async with rig.database.write() as transaction:
            await suspend_tenant(transaction, name="held", reason=None, now=utc_now())
        await rig.worker.leases.look()
        await held.result(long)
        later = await held.send(STEP)
        await steps(other, [1])
        assert await held.is_pending(later)


async def _true(value: object) -> bool:
    return bool(value)


async def test_an_evicted_adapter_goes_to_disk_and_comes_back_with_its_next_operation(
    new_rig: NewRig, base: BaseModel
) -> None:
    rig = new_rig()
    async with rig.running():
        evicted, other = await rig.clients("evicted", "other")
        await steps(evicted, [1])
        await steps(other, [1])
        async with rig.database.write() as transaction:
            await direct_run(transaction, evicted.run, RunDirective.EVICT, reason="room", now=utc_now())
        await rig.worker.leases.look()
        await until(lambda: _has(rig, evicted, RunEventKind.EVICTED))
        assert not rig.residency.holds(evicted.run)
        assert rig.residency.holds(other.run)
        await steps(evicted, [2])
        assert_undisturbed(rig, base, evicted, [1, 2])
        assert (await kinds(rig, evicted))[-1] is RunEventKind.RESTORED
        # As after a refused completion: what the snapshot does not cover is computed again.
        rig.worker.outcomes.drop(evicted.run)
        await steps(evicted, [3])
        assert (await kinds(rig, evicted))[-1] is RunEventKind.REPLAYED
        assert RunEventKind.REPLAYED not in await kinds(rig, other)


async def _has(rig: Rig, client: Client, kind: RunEventKind) -> bool:
    return kind in await kinds(rig, client)


@asynccontextmanager
async def two_trainers(new_rig: NewRig, url: str) -> AsyncIterator[tuple[Rig, Rig]]:
    """Run two trainers of one base model on a fresh database."""
    wakeups = Wakeups()
    # Nobody is to be lost here, on a busy machine neither.
    one, two = (new_rig(url=url, wakeups=wakeups, lease=timedelta(seconds=20)) for _ in range(2))
    async with one.running(), two.running():
        for rig in (one, two):
            await until(lambda rig=rig: _is_listed(rig))  # type: ignore[misc]
        yield one, two


async def _is_listed(rig: Rig) -> bool:
    async with rig.database.read() as session:
        found = await list_trainers(session, utc_now)
    return rig.worker.leases.identity.id in {one.id for one in found}


async def test_a_run_is_moved_while_it_trains_and_nobody_else_notices(
    new_rig: NewRig, base: BaseModel, migrated_postgres_url: str
) -> None:
    async with two_trainers(new_rig, migrated_postgres_url) as rigs:
        clients = await rigs[0].clients("moved", "other")
        moved, other = clients
        await asyncio.gather(*(steps(client, [1]) for client in clients))
        homes = {rig.worker.leases.identity.id: rig for rig in rigs}
        home, others_home = await trainer_of(rigs[0], moved), await trainer_of(rigs[0], other)
        (away,) = homes.keys() - {home}
        training = asyncio.gather(*(steps(client, range(2, 12)) for client in clients))
        async with rigs[0].database.write() as transaction:
            await direct_run(transaction, moved.run, RunDirective.MOVE, target=away, reason="room", now=utc_now())
        await training
        await until(lambda: _has(rigs[0], moved, RunEventKind.MOVED))
        await steps(moved, [12])
        assert await trainer_of(rigs[0], moved) == away
        assert_undisturbed(homes[away], base, moved, range(1, 13))
        assert (await kinds(rigs[0], moved)).count(RunEventKind.MOVED) == 1
        assert RunEventKind.LOST not in await kinds(rigs[0], moved)
        assert await trainer_of(rigs[0], other) == others_home
        async with rigs[0].database.read() as session:
            assert await standing_directive(session, moved.run) is None


async def test_a_drained_trainer_gives_up_every_run_and_gets_none(
    new_rig: NewRig, base: BaseModel, migrated_postgres_url: str
) -> None:
    async with two_trainers(new_rig, migrated_postgres_url) as (drained, stays):
        clients = await drained.clients("a", "b", "c", "d")
        names = [rig.worker.leases.identity.id for rig in (drained, stays)]
        training = asyncio.gather(*(steps(client, range(1, 8)) for client in clients))
        async with drained.database.write() as transaction:
            await drain_trainer(transaction, names[0], reason="upgrade", now=utc_now())
        await training
        await until(lambda: _has_no_runs(drained, names[0]))
        late = await drained.client("late")
        await late.result(late.created)
        await steps(clients[0], [8])
        assert {await trainer_of(drained, client) for client in (clients[0], late)} == {names[1]}
        assert_undisturbed(stays, base, clients[0], range(1, 9))
        async with drained.database.write() as transaction:
            await undrain_trainer(transaction, names[0])
        async with drained.database.read() as session:
            assert (await find_trainer(session, names[0], utc_now)).drained_at is None


async def _has_no_runs(rig: Rig, trainer: str) -> bool:
    async with rig.database.read() as session:
        return (await find_trainer(session, trainer, utc_now)).runs == 0
