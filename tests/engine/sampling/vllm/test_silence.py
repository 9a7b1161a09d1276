"""Silence of a server whose front answers: an engine that hangs, and one lost stream, are noticed while others are served."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import EngineFailure
from engine.sampling.vllm.replica import VllmReplica
from tests.engine.sampling.drawing import DEADLINE_S, GREEDY, Client, Running
from tests.engine.sampling.vllm.scripted import GOOD, ScriptedServer, chunk, scripted_settings

MINE, OTHER, ENDLESS = [5, 1], [6, 1], [7, 1]
LIMIT = 2.0


@pytest.fixture
async def client(scripted: ScriptedServer, world: Any, tmp_path: Path) -> AsyncIterator[Client]:
    settings = scripted_settings(scripted, world.base.facts, tmp_path)
    replica = VllmReplica(replace(settings, head_adapters=True, probe_every_s=0.05, longest_silence_s=LIMIT))
    await replica.start()
    yield Client(replica)
    await replica.close()


async def until_failed(running: Running, client: Client, world: Any) -> list[Running]:
    """Start one neighbour's request after another until ``running`` has ended, and return them."""
    others: list[Running] = []
    async with asyncio.timeout(DEADLINE_S):
        while not running.task.done():
            others.append(client.start(OTHER, world.cat, GREEDY))
            await asyncio.wait([running.task], timeout=LIMIT / 5)
    return others


async def test_requests_that_arrive_are_no_sign_of_the_engine(
    scripted: ScriptedServer, client: Client, world: Any
) -> None:
    """Nor are ends of aborted sequences, which the server's front sends. The replica hangs until it has drawn a token."""
    scripted.lines, scripted.hangs = (chunk(1),), True
    running = client.start(MINE, world.bare, GREEDY)
    await running.reached(1)
    scripted.lines = (chunk(finish="abort", end=0),)
    others = await until_failed(running, client, world)
    for one in (running, *others):
        with pytest.raises(EngineFailure):
            await one.end()
    assert (await client.replica.health()).hangs
    scripted.lines, scripted.hangs = GOOD, False
    assert (await client.ask(OTHER, world.cat, GREEDY)).only.ids == [1, 2, 3]
    health = await client.replica.health()
    assert health.alive
    assert not health.hangs


async def test_a_lost_stream_fails_while_others_are_drawn(scripted: ScriptedServer, client: Client, world: Any) -> None:
    """The sequence is aborted too: the server may draw it still."""
    scripted.lines, scripted.late_prompt = GOOD[:-1], MINE
    running = client.start(MINE, world.bare, GREEDY)
    await running.reached(1)
    others = await until_failed(running, client, world)
    with pytest.raises(EngineFailure, match="of a sequence"):
        await running.end()
    assert ["generate-tokens-x"] in scripted.aborted
    assert [(await one.end()).only.ids for one in others] == [[1, 2, 3]] * len(others)
    assert not (await client.replica.health()).hangs


async def test_a_sequence_that_waits_in_the_servers_queue_is_no_lost_stream(
    scripted: ScriptedServer, client: Client, world: Any
) -> None:
    """The server begins the oldest first. Once nothing stands before it, its silence counts."""
    scripted.endless_prompt, scripted.late_prompt, scripted.lines = ENDLESS, MINE, GOOD[2:]
    before = client.start(ENDLESS, world.cat, GREEDY)
    await before.reached(1)
    queued = client.start(MINE, world.bare, GREEDY)
    done, _ = await asyncio.wait([queued.task], timeout=2 * LIMIT)
    assert not done
    await before.leave()
    behind = client.start(ENDLESS, world.cat, GREEDY)
    with pytest.raises(EngineFailure, match="of a sequence"):
        await queued.end()
    assert not behind.task.done()
