"""Prompts that wait to be scored hold nothing up, on a stand-in server. Needs no vLLM."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import WeftError
from engine.sampling.replica import PromptScored, PromptScoring
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.settings import VllmReplicaSettings
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.vllm.scripted import GOOD, ScriptedServer, scripted_settings
from workers.base_forward import BaseForward, Prompt

PROMPT, OTHER, THIRD = [5, 1], [7, 1], [9, 1]
SCORING = PromptScoring(1, logprobs=True, topk=0)


class SlowForward(BaseForward):
    """A forward whose thread waits for ``may`` before it computes; ``scored`` are the prompts that it has computed."""

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self.may, self.begun = threading.Event(), threading.Event()
        self.scored: list[list[int]] = []

    def score_together(self, prompts: Sequence[Prompt]) -> list[PromptScored | WeftError]:
        self.begun.set()
        assert self.may.wait(60)
        self.scored += [prompt.tokens.tolist() for prompt in prompts]
        return super().score_together(prompts)


@pytest.fixture
def settings(scripted: ScriptedServer, world: Any, tmp_path: Path) -> VllmReplicaSettings:
    return replace(scripted_settings(scripted, world.base.facts, tmp_path), max_resident=1, head_adapters=True)


@asynccontextmanager
async def slow_client(settings: VllmReplicaSettings, world: Any) -> AsyncIterator[tuple[Client, SlowForward]]:
    forward = SlowForward(world.base)
    replica = VllmReplica(settings, forward)
    await replica.start()
    try:
        yield Client(replica), forward
    finally:
        forward.may.set()
        await replica.close()
        await forward.close()


async def test_a_prompt_that_waits_for_the_forward_holds_no_adapters_place(
    settings: VllmReplicaSettings, world: Any
) -> None:
    """The server has one place: a neighbour's adapter is loaded and drawn from meanwhile."""
    async with slow_client(settings, world) as (client, forward):
        waiting = client.start(PROMPT, world.cat, GREEDY, scoring=SCORING)
        await asyncio.to_thread(forward.begun.wait, 60)
        async with asyncio.timeout(20):
            assert (await client.ask(OTHER, world.dog, GREEDY)).only.ids == [1, 2, 3]
        forward.may.set()
        drawn = await waiting.end()
        assert drawn.scored is not None
        assert drawn.only.ids == [1, 2, 3]


async def test_the_forward_scores_no_prompt_that_was_cut(settings: VllmReplicaSettings, world: Any) -> None:
    """A neighbour's that waited behind it is scored."""
    async with slow_client(settings, world) as (client, forward):
        first = client.start(PROMPT, world.cat, GREEDY, scoring=SCORING)
        await asyncio.to_thread(forward.begun.wait, 60)
        cut = client.start(OTHER, world.cat, GREEDY, scoring=SCORING)
        neighbour = client.start(THIRD, world.dog, GREEDY, scoring=SCORING)
        await cut.cut_at_once()
        assert (await cut.end()).only.reason == "cut"
        forward.may.set()
        for running in (first, neighbour):
            assert (await running.end()).scored is not None
        assert forward.scored == [PROMPT, THIRD]


async def test_the_server_scores_no_prompt_that_was_cut_before_it_had_a_place(
    settings: VllmReplicaSettings, scripted: ScriptedServer, world: Any
) -> None:
    replica = VllmReplica(replace(settings, head_adapters=False, max_streams=1))
    await replica.start()
    client = Client(replica)
    scripted.lines, scripted.hangs = (), True
    neighbour = client.start(PROMPT, world.bare, GREEDY)
    await scripted.until_asked(PROMPT, 1)
    cut = client.start(OTHER, world.bare, GREEDY, scoring=SCORING)
    await cut.cut_at_once()
    assert (await cut.end()).only.reason == "cut"
    scripted.lines, scripted.hangs = GOOD, False
    await neighbour.leave()
    assert (await client.ask(THIRD, world.bare, GREEDY)).only.ids == [1, 2, 3]
    assert scripted.asked(OTHER) == 0
    await replica.close()


async def test_waiting_for_the_forward_is_no_silence_of_the_server(settings: VllmReplicaSettings, world: Any) -> None:
    """A neighbour's request, which has come last, is not failed either."""
    quick = replace(settings, probe_every_s=0.05, longest_silence_s=2.0)
    async with slow_client(quick, world) as (client, forward):
        waiting = [client.start(PROMPT, who, GREEDY, scoring=SCORING) for who in (world.cat, world.dog)]
        done, _ = await asyncio.wait([running.task for running in waiting], timeout=3.0)
        assert not done
        forward.may.set()
        for running in waiting:
            assert (await running.end()).only.ids == [1, 2, 3]
