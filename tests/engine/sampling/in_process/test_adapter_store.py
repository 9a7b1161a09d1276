"""Adapter versions in the in-process replica's memory: read once, pinned while in use, evicted when idle."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import EngineFailure
from contracts.operations import LoraSettings
from engine.model.lora import LoraWeights
from engine.sampling.in_process.adapter_store import AdapterStore
from engine.sampling.replica import AdapterVersion


def test_a_version_is_read_once_however_many_ask(world: Any) -> None:
    reads: list[str] = []
    may_read = threading.Event()
    settings = LoraSettings(rank=2, seed=0)
    weights = LoraWeights.initialise(settings, world.base.layout(settings), world.base.device)

    def read(version: AdapterVersion) -> LoraWeights:
        assert may_read.wait(30)
        reads.append(version.name)
        return weights

    store = AdapterStore(read, capacity=2)
    with ThreadPoolExecutor(8) as pool:
        pins = list(pool.map(lambda _: store.pin(AdapterVersion("a", Path("a")), "cats"), range(32)))
    may_read.set()
    assert all(pin.weights.result(30) is weights for pin in pins)
    assert reads == ["a"]
    store.close()


def test_held_versions_are_not_evicted_and_the_oldest_idle_one_is(world: Any) -> None:
    settings = LoraSettings(rank=2, seed=0)
    weights = LoraWeights.initialise(settings, world.base.layout(settings), world.base.device)
    store = AdapterStore(lambda _: weights, capacity=2)

    def pin(name: str) -> Any:
        return store.pin(AdapterVersion(name, Path(name)), "cats")

    a, b = pin("a"), pin("b")
    b.weights.result(30)
    c = pin("c")
    assert not c.weights.done()
    a.release()
    c.weights.result(30)
    assert store.names() == ("b", "c")
    waiting = pin("d")
    store.close()
    with pytest.raises(EngineFailure):
        waiting.weights.result(30)
    with pytest.raises(EngineFailure):
        pin("e")


def test_tenants_take_turns_at_the_loader(world: Any) -> None:
    """One tenant's many versions wait for the loader. A neighbour's is read next, and so is one that both ask for."""
    settings = LoraSettings(rank=2, seed=0)
    weights = LoraWeights.initialise(settings, world.base.layout(settings), world.base.device)
    reads: list[str] = []
    is_reading, may_read = threading.Event(), threading.Event()

    def read(version: AdapterVersion) -> LoraWeights:
        reads.append(version.name)
        is_reading.set()
        assert may_read.wait(30)
        return weights

    def pin(name: str, owner: str) -> Any:
        return store.pin(AdapterVersion(name, Path(name)), owner)

    store = AdapterStore(read, capacity=64)
    flood = [pin(f"v{number}", "flood") for number in range(20)]
    assert is_reading.wait(30)
    light = [pin("theirs", "light"), pin("v19", "light")]
    may_read.set()
    for one in (*flood, *light):
        assert one.weights.result(30) is weights
    assert (reads.index("theirs") <= 2, reads.index("v19") <= 4) == (True, True), reads
    assert sorted(reads) == sorted({f"v{number}" for number in range(20)} | {"theirs"})
    store.close()


def test_a_tenants_versions_in_use_leave_a_place_for_a_neighbours(world: Any) -> None:
    settings = LoraSettings(rank=2, seed=0)
    weights = LoraWeights.initialise(settings, world.base.layout(settings), world.base.device)
    store = AdapterStore(lambda _: weights, capacity=9)
    flood = [store.pin(AdapterVersion(f"v{number}", Path("v")), "flood") for number in range(12)]
    for one in flood[:8]:
        one.weights.result(30)
    store.pin(AdapterVersion("theirs", Path("theirs")), "light").weights.result(30)
    assert [one.weights.done() for one in flood] == [True] * 8 + [False] * 4
    for one in flood[:4]:
        one.release()
    for one in flood:
        one.weights.result(30)
    store.close()
