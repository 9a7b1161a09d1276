"""Adapters under a byte budget: the least recently used is paged out and comes back bit-equal; others are not touched."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sqlalchemy import update

from contracts.errors import EngineFailure, Unavailable
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import LoadWeights, LoraSettings, OptimStep, OptimStepped, SaveWeights, TrainingBatch
from engine.model.base import BaseModel
from engine.training.adapter_state import AdapterState, largest_nbytes
from store.clock import utc_now
from store.tables import Session
from tenants.checkpoints import CHECKPOINTS, SNAPSHOTS
from tenants.project_limits import set_project_limits
from tenants.projects import create_project
from tenants.run_history import RunEventKind, note_run_events
from tenants.sessions import NewSession, create_session
from tenants.trainers import list_trainers, resident_runs
from tests.engine.training.conftest import make_batch
from tests.store.flushed_first import watch
from tests.workers.training.conftest import DEADLINE, Client, NewRig, Rig, busy_file_threads, undisturbed
from workers.training import adapter_restorer, adapter_tasks
from workers.training.trainer_report import TrainerReport

LORA = LoraSettings(rank=4, seed=1)
STEP = OptimStep(learning_rate=1e-3)


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


def room_for(base: BaseModel, adapters: int) -> int:
    """Return the bytes that so many adapters need."""
    return adapters * largest_nbytes(base, LORA)


def assert_bit_equal(ours: AdapterState, theirs: AdapterState) -> None:
    """Assert that weights, gradient, moments and step count are equal."""
    assert torch.equal(ours.weights.vector, theirs.weights.vector)
    assert (ours.gradient is None) == (theirs.gradient is None)
    if ours.gradient is not None and theirs.gradient is not None:
        assert torch.equal(ours.gradient, theirs.gradient)
    assert ours.optimizer is not None
    assert theirs.optimizer is not None
    assert torch.equal(ours.optimizer.exp_avg, theirs.optimizer.exp_avg)
    assert torch.equal(ours.optimizer.exp_avg_sq, theirs.optimizer.exp_avg_sq)
    assert ours.optimizer.step == theirs.optimizer.step


@pytest.mark.parametrize("snapshot_operations", [64, 1])
async def test_an_adapter_paged_out_comes_back_bit_equal(
    new_rig: NewRig, base: BaseModel, snapshot_operations: int
) -> None:
    """Room for one of two tenants: each operation brings its adapter in, with gradients and moments in progress."""
    rig = new_rig(memory_bytes=room_for(base, 1), snapshot_operations=snapshot_operations)
    operations = [batch(1), STEP, batch(2), batch(3), STEP, batch(4)]
    async with rig.running():
        first, second = await rig.clients("first", "second")
        for operation in operations:
            for client in (first, second):
                await client.do(operation)
                assert rig.residency.residents() == [client.run]
        states = [undisturbed(base, client.lora, list(operations)) for client in (first, second)]
        assert_bit_equal(second.state(), states[1])
        await first.do(STEP)
        expected = undisturbed(base, first.lora, [*operations, STEP])
        assert_bit_equal(first.state(), expected)
    assert rig.counts.paged_out == 2 * len(operations) + 2
    assert rig.counts.paged_in == 2 * len(operations) + 1


async def test_a_power_cut_takes_back_no_snapshot_whose_predecessor_is_gone(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that names the new folder is on the disk before the old folder goes: one of both is always there."""
    rig = new_rig(snapshot_operations=1)
    watched = watch(rig.database, monkeypatch)
    async with rig.running():
        client, other = await rig.clients("client", "other")
        while len(watched.removed) < 3:
            for one in (client, other):
                await one.do(STEP)
    assert all(watched.removed.values())


async def test_the_least_recently_used_leaves_and_nobody_else(new_rig: NewRig, base: BaseModel) -> None:
    rig = new_rig(memory_bytes=room_for(base, 3))
    async with rig.running():
        first, second, third = await rig.clients("first", "second", "third")
        for client in (second, third, first):
            await client.do(batch(1))
        (fourth,) = await rig.clients("fourth")
        assert set(rig.residency.residents()) == {third.run, first.run, fourth.run}
        assert rig.counts.paged_out == 1
        await third.do(STEP)
        await second.do(STEP)
        assert set(rig.residency.residents()) == {third.run, fourth.run, second.run}
        assert (rig.counts.paged_out, rig.counts.paged_in) == (2, 1)


async def test_an_adapter_needed_while_it_is_being_written_comes_back_at_once(new_rig: NewRig, base: BaseModel) -> None:
    """The adapter that needs its room waits until it is written, then comes in."""
    rig = new_rig(memory_bytes=room_for(base, 2))
    async with rig.running():
        first, second, third = await rig.clients("first", "second", "third")
        await second.do(batch(1))
        await third.do(batch(1))
        with busy_file_threads():
            waiting = await first.send(batch(1))
            while second.run in rig.residency.residents():
                await third.do(batch(2))
            assert isinstance(await second.do(STEP), OptimStepped)
            assert await first.is_pending(waiting)
        await first.result(waiting)
        await second.do(batch(1))
        assert_bit_equal(second.state(), undisturbed(base, second.lora, [batch(1), STEP, batch(1)]))


@pytest.mark.parametrize("parent", [SNAPSHOTS, CHECKPOINTS])
async def test_a_folder_that_is_away_for_a_while_fails_nothing(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch, parent: str
) -> None:
    """A shared disk is away: what reads from it is tried until it is back, and others train meanwhile."""
    tried = asyncio.Event()
    for name in ("read_state", "read_checkpoint"):
        monkeypatch.setattr(adapter_restorer, name, noting_outages(getattr(adapter_restorer, name), tried))
    rig = new_rig(memory_bytes=room_for(base, 3))
    async with rig.running():
        first, second = await rig.clients("first", "second")
        for client in (first, second):
            await client.do(batch(1))
            await client.do(STEP)
        path = (await first.do(SaveWeights("kept"))).path
        if parent == SNAPSHOTS:
            await out_of_memory(rig, first)
        folder = rig.data_folder.path(parent)
        away = folder.rename(folder.with_name("away"))
        waiting = await first.send(
            batch(2) if parent == SNAPSHOTS else LoadWeights(path, creates=False, optimizer=True)
        )
        async with asyncio.timeout(DEADLINE):
            for _ in range(2):
                await tried.wait()
                tried.clear()
        await second.do(batch(2))
        assert await first.is_pending(waiting)
        away.rename(folder)
        await first.result(waiting)
        done = [batch(1), STEP]
        assert_bit_equal(second.state(), undisturbed(base, second.lora, [*done, batch(2)]))
        assert_bit_equal(first.state(), undisturbed(base, first.lora, [*done, *([batch(2)] * (parent == SNAPSHOTS))]))


@pytest.mark.parametrize("times", [3, 1_000_000])
async def test_an_adapter_without_room_on_the_device_is_tried_for_a_while_and_then_fails_its_operation_alone(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    """The lane and the state stay, and the log has the cause once."""
    monkeypatch.setattr(adapter_tasks, "_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(adapter_tasks, "_COME_IN_SECONDS", DEADLINE if times == 3 else 0.2)
    read, tries, rig = adapter_restorer.read_state, [times], new_rig()

    def reading(*given: Any, **named: Any) -> AdapterState:
        tries[0] -= 1
        if tries[0] >= 0:
            raise torch.OutOfMemoryError("no memory")
        return read(*given, **named)

    async with rig.running():
        client, other = await rig.clients("client", "other")
        for one in (client, other):
            await one.do(batch(1))
        await out_of_memory(rig, client)
        monkeypatch.setattr(adapter_restorer, "read_state", reading)
        dropped: list[RunId] = []
        monkeypatch.setattr(rig.worker.outcomes, "drop", dropped.append)
        stepping = await client.send(STEP)
        assert isinstance(await other.do(STEP), OptimStepped)
        if times == 3:
            assert isinstance(await client.result(stepping), OptimStepped)
        else:
            with pytest.raises(EngineFailure, match=r"no memory for this model's adapter now; .* state is kept"):
                await client.result(stepping)
            tries[0] = 0
            assert isinstance(await client.do(STEP), OptimStepped)
        assert dropped == []
        assert caplog.text.count("could not be brought in") == 1
        assert_bit_equal(client.state(), undisturbed(rig.trainer.base, client.lora, [batch(1), STEP]))


def noting_outages(read: Callable[..., AdapterState], tried: asyncio.Event) -> Callable[..., AdapterState]:
    """Return ``read``, which sets ``tried`` where the folder is away."""
    loop = asyncio.get_running_loop()

    def reading(*given: Any, **named: Any) -> AdapterState:
        try:
            return read(*given, **named)
        except Unavailable:
            loop.call_soon_threadsafe(tried.set)
            raise

    return reading


async def out_of_memory(rig: Rig, client: Client) -> None:
    """Page the client's adapter out, and wait until it is on disk."""
    rig.residency.page_out(client.run)
    async with asyncio.timeout(DEADLINE):
        await rig.residency._snapshots.finished(client.run)


async def test_operators_are_told_which_runs_are_in_memory_and_of_replays(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one of two tenants: the list in the trainer's row follows each change, and counts the row's own replays."""
    rig = new_rig(memory_bytes=room_for(base, 1))
    trainer, told = rig.worker.leases.identity.id, asyncio.Event()
    tell = TrainerReport.tell

    async def watched(report: TrainerReport) -> None:
        await tell(report)
        told.set()

    monkeypatch.setattr(TrainerReport, "tell", watched)
    async with rig.running():
        first, second = await rig.clients("first", "second")
        for client in (first, second):
            await client.do(STEP)
            async with asyncio.timeout(DEADLINE):
                while await told_residents(rig, trainer) != {(trainer, client.run)}:
                    await told.wait()
                    told.clear()
            assert rig.residency.residents() == [client.run]
        async with rig.database.write() as transaction:
            for by in (trainer, "another"):
                await note_run_events(transaction, [second.run], RunEventKind.REPLAYED, trainer=by, now=utc_now())
        async with rig.database.read() as session:
            (standing,) = await list_trainers(session, utc_now)
        assert (standing.residents, standing.replays) == (1, 1)


async def told_residents(rig: Rig, trainer: str) -> frozenset[tuple[str, str]]:
    """Return what the trainer's row tells."""
    async with rig.database.read() as session:
        return await resident_runs(session, [trainer])


async def test_more_adapters_than_room_at_once_stay_within_the_budget_and_all_train(
    new_rig: NewRig, base: BaseModel
) -> None:
    """Eight creations and their steps accepted at once, room for three: the largest sum ever held is the budget."""
    rig = new_rig(memory_bytes=room_for(base, 3))
    held: list[int] = []
    put = rig.trainer.put

    def watched(run: RunId, state: AdapterState) -> None:
        put(run, state)
        held.append(len(rig.trainer.runs()))

    rig.trainer.put = watched  # type: ignore[method-assign]
    clients = [await rig.client(f"tenant{number}", LORA) for number in range(8)]
    requests = [(client, await client.send(payload)) for client in clients for payload in (batch(1), STEP, batch(2))]
    async with rig.running():
        for client, request in requests:
            await client.result(request)
        assert max(held) <= 3
        assert rig.counts.paged_out <= 3 * len(clients), "nobody is sent out and back while others wait"
        for client in clients:
            assert await client.do(STEP) is not None
            weights = undisturbed(base, LORA, [batch(1), STEP, batch(2), STEP]).weights.vector
            assert torch.allclose(client.state().weights.vector, weights, rtol=1e-5, atol=1e-6)
    assert rig.counts.paged_out >= 5


async def test_a_run_that_its_full_project_refuses_evicts_nobody_and_holds_nobody_else(
    new_rig: NewRig, base: BaseModel
) -> None:
    """Room for two adapters, both taken. One refusal holds every waiting run of the project, and no other one."""
    rig = new_rig(memory_bytes=room_for(base, 2))
    async with rig.running():
        first, theirs = await rig.clients("cats", "dogs")
        async with rig.database.write() as transaction:
            project = (await create_project(transaction, first.tenant, "small", utc_now)).id
            await set_project_limits(transaction, first.tenant, project, {"open_runs": 1}, utc_now)
            await transaction.execute(update(Session).where(Session.id == first.session).values(project=project))
            beside = await create_session(transaction, first.tenant, NewSession([], None, "raw", None, None), utc_now)
        waiting = [await rig.model(first.tenant, first.session, LORA, number) for number in (1, 2, 3)]
        for _ in range(2):
            await theirs.do(batch(1))
            await first.do(batch(1))
        assert rig.counts.paged_out == 0
        assert set(rig.residency.residents()) == {first.run, theirs.run}
        limits = rig.worker._turns.creations
        limits.look_again()
        await limits.ask(first.tenant, [one.run for one in waiting])
        assert [limits.holds_back(first.tenant, one.run) for one in waiting] == [True] * 3
        others = [await rig.model(first.tenant, beside, LORA, 4), await rig.client("birds", LORA)]
        for other in others:
            await other.result(other.created)
        assert [await one.is_pending(one.created) for one in waiting] == [True] * 3
        await first.unload()
        await waiting[0].result(waiting[0].created)
        assert await waiting[1].is_pending(waiting[1].created)


async def test_a_restart_brings_every_tenant_back_bit_equal(new_rig: NewRig, base: BaseModel) -> None:
    """An orderly end writes what is in memory; the next start rebuilds nothing by computing."""
    rig = new_rig()
    async with rig.running():
        clients = await rig.clients("first", "second")
        for client in clients:
            for operation in (batch(1), STEP, batch(2)):
                await client.do(operation)
    again = new_rig(url=rig.database.engine.url.render_as_string())
    async with again.running():
        for client in clients:
            client.rig = again
            assert isinstance(await client.do(STEP), OptimStepped)
            assert_bit_equal(client.state(), undisturbed(base, client.lora, [batch(1), STEP, batch(2), STEP]))
    assert again.counts.passes == 0
    assert again.counts.paged_in == 2


async def test_an_unloaded_adapter_leaves_memory_and_its_neighbour_stays(new_rig: NewRig) -> None:
    rig = new_rig()
    async with rig.running():
        leaving, staying = await rig.clients("leaving", "staying")
        for client in (leaving, staying):
            await client.do(batch(1))
        await leaving.unload()
        await rig.compute.run(lambda: None)
        assert rig.trainer.runs() == [staying.run]
        assert isinstance(await staying.do(STEP), OptimStepped)
