"""Adapters of unequal sizes under one byte budget: each counts as large as it is, before it is in memory, too."""

import asyncio

import pytest

from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, LoraSettings, OptimStep, OptimStepped, TrainingBatch
from engine.model.base import BaseModel
from engine.training.adapter_state import AdapterState, largest_nbytes
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import Client, NewRig, Rig
from tests.workers.training.test_residency import out_of_memory
from tests.workers.training.test_unread_checkpoints import SickDisk, saved
from workers.training import adapter_room

SMALL, LARGE = LoraSettings(rank=2, seed=1), LoraSettings(rank=8, seed=2)
STEP = OptimStep(learning_rate=1e-3)


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


def room(base: BaseModel, small: int) -> int:
    """Return the bytes of so many small adapters. A large one is four."""
    assert largest_nbytes(base, LARGE) == 4 * largest_nbytes(base, SMALL)
    return small * largest_nbytes(base, SMALL)


def most_held(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of the adapters in the trainer's memory, one entry for each adapter that comes in from now on."""
    put, held = rig.trainer.put, []

    def watched(run: RunId, state: AdapterState) -> None:
        put(run, state)
        states = [rig.trainer.state(one) for one in rig.trainer.runs()]
        held.append(sum(largest_nbytes(rig.trainer.base, one.weights.settings) for one in states))

    monkeypatch.setattr(rig.trainer, "put", watched)
    return held


async def made(rig: Rig, name: str, lora: LoraSettings) -> Client:
    """Make a tenant with a model of these settings that has trained."""
    client = await rig.client(name, lora)
    await client.result(client.created)
    await client.do(batch(1))
    return client


async def test_an_adapter_larger_than_all_in_memory_keeps_to_the_budget(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Created, and restored. As many idle neighbours leave as must; the one used last stays."""
    rig = new_rig(memory_bytes=room(base, 5))
    async with rig.running():
        cats, dogs = await made(rig, "cats", SMALL), await made(rig, "dogs", SMALL)
        held = most_held(rig, monkeypatch)
        large = await made(rig, "large", LARGE)
        assert set(rig.residency.residents()) == {dogs.run, large.run}
        await out_of_memory(rig, large)
        await cats.do(STEP)
        assert isinstance(await dogs.do(STEP), OptimStepped)
        assert isinstance(await large.do(STEP), OptimStepped)
        assert set(rig.residency.residents()) == {dogs.run, large.run}
    assert max(held) <= room(base, 5)


async def test_adapters_that_come_in_together_count_each_as_large_as_it_is(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five creations are accepted at once, beside another tenant's adapter, which trains on."""
    rig = new_rig(memory_bytes=room(base, 9))
    other = await rig.client("other", SMALL)
    held = most_held(rig, monkeypatch)
    clients = [await rig.client(f"tenant{number}", LARGE if number % 2 else SMALL) for number in range(5)]
    async with rig.running():
        for one in (other, *clients):
            await one.result(one.created)
            assert isinstance(await one.do(STEP), OptimStepped)
        assert isinstance(await other.do(STEP), OptimStepped)
    assert max(held) <= room(base, 9)


async def test_a_small_adapter_pages_out_nobody_where_it_has_room_beside_a_large_one(
    new_rig: NewRig, base: BaseModel
) -> None:
    rig = new_rig(memory_bytes=room(base, 6))
    async with rig.running():
        large, cats = await made(rig, "large", LARGE), await made(rig, "cats", SMALL)
        dogs = await made(rig, "dogs", SMALL)
        assert set(rig.residency.residents()) == {large.run, cats.run, dogs.run}
        await out_of_memory(rig, dogs)
        assert isinstance(await dogs.do(STEP), OptimStepped)
        assert set(rig.residency.residents()) == {large.run, cats.run, dogs.run}
    assert rig.counts.paged_out == 1, "the one that the test has paged out"


async def test_a_large_adapter_gets_its_room_while_small_ones_come_and_go(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small adapters of others want each bit of memory that becomes free. They train on afterwards."""
    rig = new_rig(memory_bytes=room(base, 4))
    async with rig.running():
        large = await made(rig, "large", LARGE)
        small = [await made(rig, f"small{number}", SMALL) for number in range(6)]
        held = most_held(rig, monkeypatch)
        is_done = asyncio.Event()

        async def train_on(client: Client) -> None:
            ahead = [await client.send(batch(2)) for _ in range(2)]
            while not is_done.is_set():
                ahead.append(await client.send(batch(2)))
                assert isinstance(await client.result(ahead.pop(0)), ForwardBackwardOutput)

        training = [asyncio.create_task(train_on(client)) for client in small]
        try:
            assert isinstance(await large.do(STEP), OptimStepped)
        finally:
            is_done.set()
            await asyncio.gather(*training)
        for client in small:
            assert isinstance(await client.do(STEP), OptimStepped)
    assert max(held) <= room(base, 4)


async def test_an_adapter_that_waits_for_room_for_long_holds_up_no_later_one(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier load, whose file cannot be read, keeps a part of the memory that the large adapter needs."""
    monkeypatch.setattr(adapter_room, "_PROMISED_SECONDS", 0.1)
    disk, rig = SickDisk(monkeypatch), new_rig(memory_bytes=room(base, 4))
    async with rig.running():
        large = await made(rig, "large", LARGE)
        cats = await made(rig, "cats", SMALL)
        load = await saved(cats)
        disk.times = 10_000
        loading, stepping = await cats.send(load), await large.send(STEP)
        birds = await made(rig, "birds", SMALL)
        assert isinstance(await birds.do(STEP), OptimStepped)
        assert [await cats.is_pending(loading), await large.is_pending(stepping)] == [True, True]
        disk.times = 0
        await cats.result(loading)
        assert isinstance(await large.result(stepping), OptimStepped)


async def test_nobody_leaves_for_an_adapter_whose_room_would_be_too_small_all_the_same(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier load keeps a large adapter in memory; a small neighbour trains on while another large one waits."""
    disk, rig = SickDisk(monkeypatch), new_rig(memory_bytes=room(base, 5))
    async with rig.running():
        large = await made(rig, "large", LARGE)
        cats, birds = await made(rig, "cats", LARGE), await made(rig, "birds", SMALL)
        load = await saved(cats)
        disk.times = 10_000
        loading, stepping = await cats.send(load), await large.send(STEP)
        before = rig.counts.paged_out
        for _ in range(4):
            assert isinstance(await birds.do(STEP), OptimStepped)
        assert [await cats.is_pending(loading), await large.is_pending(stepping)] == [True, True]
        assert rig.counts.paged_out == before
        disk.times = 0
        await cats.result(loading)
        assert isinstance(await large.result(stepping), OptimStepped)
