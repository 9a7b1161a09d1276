"""Places on a vLLM server: one owner's many sequences leave room for another owner. Needs no vLLM."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.sampling.vllm.replica import VllmReplica
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.vllm.scripted import ScriptedServer, chunk, scripted_settings

FLOOD, OTHER, LIGHT = [5, 1], [5, 2], [5, 3]


@pytest.fixture
async def client(scripted: ScriptedServer, world: Any, tmp_path: Path) -> AsyncIterator[Client]:
    settings = replace(scripted_settings(scripted, world.base.facts, tmp_path), max_streams=9)
    replica = VllmReplica(settings)
    await replica.start()
    yield Client(replica)
    await replica.close()


async def test_one_prompts_many_sequences_leave_room_for_another_tenant(
    client: Client, scripted: ScriptedServer, world: Any
) -> None:
    """The server never has more sequences than it works on at once, and a neighbour's is among them at once."""
    scripted.hangs = True
    scripted.lines = (chunk(1),)
    flood = client.start(FLOOD, world.bare, replace(GREEDY, seeds=(None,) * 40, owner="flood"))
    await scripted.until_asked(FLOOD, 8)
    other = client.start(OTHER, world.bare, replace(GREEDY, owner="flood"))
    light = client.start(LIGHT, world.bare, replace(GREEDY, seeds=(None,) * 2, owner="light"))
    await scripted.until_asked(LIGHT, 1)
    assert (scripted.asked(FLOOD), scripted.asked(OTHER), scripted.asked(LIGHT)) == (8, 0, 1)
    # Places that come free go to both in turns.
    scripted.hangs = False
    scripted.lines = (chunk(1, finish="length", end=1), "[DONE]")
    await asyncio.gather(*(flood.cut(index) for index in range(3)), return_exceptions=True)
    await scripted.until_asked(LIGHT, 2)
    for running in (flood, other, light):
        await running.leave()
