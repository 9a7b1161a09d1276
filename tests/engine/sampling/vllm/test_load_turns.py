"""Owners of adapter versions take turns at the places of a vLLM server. Needs no vLLM."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.sampling.load_turns import LoadTurns
from engine.sampling.vllm.replica import VllmReplica
from tests.engine.sampling.conftest import Adapted
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.vllm.scripted import ScriptedServer, chunk, scripted_settings

LONG = 60.0
"""Seconds, for a slow machine."""
PROMPT = [5, 1]
FLOOD = 20
BEFORE_A_NEIGHBOUR = 8
"""Loads of the flood that may come first: the four on their way, and the three sent beside the neighbour's."""
Make = Callable[[str], Adapted]


@pytest.fixture
def version(world: Any) -> Make:
    """``version(name)``: another version with the weights of the dog."""
    return lambda name: replace(world.dog, version=replace(world.dog.version, name=name))


@pytest.fixture
def serving(scripted: ScriptedServer, world: Any, tmp_path: Path) -> Any:
    """``serving(places)``: a client of a replica with so many places for versions."""

    @asynccontextmanager
    async def started(places: int) -> AsyncIterator[Client]:
        replica = VllmReplica(replace(scripted_settings(scripted, world.base.facts, tmp_path), max_resident=places))
        await replica.start()
        try:
            yield Client(replica)
        finally:
            scripted.may_load.set()
            await replica.close()

    return started


class Queue:
    """Owners and names of the versions that have come to wait for a place, in order."""

    def __init__(self) -> None:
        self.owners: list[str] = []
        self.names: list[str] = []
        self.changed = asyncio.Event()

    async def until(self, owner: str, count: int) -> None:
        """Wait until so many versions of ``owner`` have come."""
        while self.owners.count(owner) < count:
            self.changed.clear()
            await self.changed.wait()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """The queue of the replica: a version joins it once a thread has checked its files."""
    seen, add = Queue(), LoadTurns.add

    def noted(self: LoadTurns[Any], waiting: Any, owner: str, share: float) -> None:
        add(self, waiting, owner, share)
        seen.owners.append(owner)
        seen.names.append(waiting.version.name)
        seen.changed.set()

    monkeypatch.setattr(LoadTurns, "add", noted)
    return seen


async def flooded(client: Client, scripted: ScriptedServer, queue: Queue, version: Make) -> list[asyncio.Task[None]]:
    """Ask for very many versions of one tenant, of which the server has been sent four and has loaded none."""
    scripted.may_load.clear()
    before = len(scripted.loaded)
    flood = [client.replica.load(version(f"v{number}").version, owner="flood") for number in range(FLOOD)]
    tasks = [asyncio.create_task(one) for one in flood]
    await queue.until("flood", FLOOD)
    await scripted.until_loads(before + 4)
    return tasks


async def test_many_versions_of_one_tenant_do_not_stand_before_a_neighbours(
    serving: Any, scripted: ScriptedServer, queue: Queue, version: Make
) -> None:
    """The server loads what it is sent oldest first. So it is sent few, and the neighbour's next."""
    async with serving(places=64) as client, asyncio.timeout(LONG):
        before = len(scripted.loaded)
        flood = await flooded(client, scripted, queue, version)
        theirs = asyncio.create_task(client.replica.load(version("theirs").version, owner="light"))
        await queue.until("light", 1)
        scripted.may_load.set()
        await asyncio.gather(*flood, theirs)
        assert scripted.loaded.index("theirs") - before < BEFORE_A_NEIGHBOUR


async def test_a_version_that_two_tenants_ask_for_comes_in_the_first_of_their_turns(
    serving: Any, scripted: ScriptedServer, queue: Queue, version: Make
) -> None:
    async with serving(places=64) as client, asyncio.timeout(LONG):
        before = len(scripted.loaded)
        flood = await flooded(client, scripted, queue, version)
        last = queue.names[-1]
        shared = asyncio.create_task(client.replica.load(version(last).version, owner="light"))
        await queue.until("light", 1)
        scripted.may_load.set()
        await asyncio.gather(*flood, shared)
        assert scripted.loaded.index(last) - before < BEFORE_A_NEIGHBOUR
        assert scripted.loaded.count(last) == 1


async def test_a_tenants_versions_in_use_leave_a_place_for_a_neighbours(
    serving: Any, scripted: ScriptedServer, version: Make
) -> None:
    """One tenant has eight of nine places, however many of its samples never end."""
    scripted.hangs = True
    scripted.lines = (chunk(1),)
    async with serving(places=9) as client, asyncio.timeout(LONG):
        flood = [client.start(PROMPT, version(f"v{number}"), replace(GREEDY, owner="flood")) for number in range(12)]
        await scripted.until_asked(PROMPT, 8)
        light = client.start([5, 2], version("theirs"), replace(GREEDY, owner="light"))
        await scripted.until_asked([5, 2], 1)
        assert scripted.asked(PROMPT) == 8
        # A place that comes free goes to the next of the flood's.
        await light.leave()
        drawn = next(body["model"] for body in scripted.bodies if body["token_ids"] == PROMPT)
        await flood[int(drawn.removeprefix("v"))].leave()
        await scripted.until_asked(PROMPT, 9)
        for one in flood:
            await one.leave()
