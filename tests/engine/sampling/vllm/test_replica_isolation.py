"""Tenants on one vLLM server do not change each other's numbers: base, adapters and adapted heads in one batch."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contracts.errors import InvalidRequest
from engine.sampling.replica import PromptScoring
from engine.sampling.vllm.settings import VllmReplicaSettings
from tests.engine.sampling.conftest import QWEN_TARGETS, Adapted, make_adapter
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.vllm.conftest import EXACT, assert_greedy, serving
from workers.base_forward import BaseForward

PROMPT = [72, 101, 108, 108, 111]
OTHER_PROMPT = [250, 3, 17, 200, 5, 5, 5, 9]
END_OF_TEXT = 256
LONG = replace(GREEDY, max_tokens=300)


class HeldForward(BaseForward):
    """A forward that computes nothing before ``may`` is set."""

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self.may = asyncio.Event()

    async def score(self, *asked: Any, **how: Any) -> Any:
        await self.may.wait()
        return await super().score(*asked, **how)


@pytest.fixture(scope="module")
def everyone(world: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Adapted]:
    """The bare base, and adapters on everything, on attention, on the head alone and on the MLP: more than slots."""
    folder, path = tmp_path_factory.mktemp("more"), world.base.facts.path
    return [
        world.bare,
        world.cat,
        world.dog,
        make_adapter(path, folder / "head", "head", 3, 8, ("lm_head",)),
        make_adapter(path, folder / "mlp", "mlp", 4, 5, QWEN_TARGETS[4:7]),
    ]


async def test_all_at_once(client: Client, everyone: list[Adapted]) -> None:
    asks = [(prompt, who) for prompt in (PROMPT, OTHER_PROMPT) for who in everyone]
    outputs = await asyncio.gather(*(client.ask(prompt, who, replace(GREEDY, max_tokens=60)) for prompt, who in asks))
    for (prompt, who), output in zip(asks, outputs, strict=True):
        assert_greedy(output.only, who, prompt)


@pytest.mark.parametrize("company", range(1, 5))
async def test_the_bare_base_beside_and_after_any_one(client: Client, everyone: list[Adapted], company: int) -> None:
    beside = client.start(PROMPT, everyone[company], replace(GREEDY, max_tokens=100))
    await beside.reached(1)
    assert_greedy((await client.ask(PROMPT, everyone[0], GREEDY)).only, everyone[0], PROMPT)
    await beside.end()
    assert_greedy((await client.ask(OTHER_PROMPT, everyone[0], GREEDY)).only, everyone[0], OTHER_PROMPT)


async def test_tokens_together_beside_tokens_one_by_one(client: Client, everyone: list[Adapted]) -> None:
    """The numbers of both are their own."""
    one_by_one = client.start(PROMPT, everyone[1], replace(GREEDY, max_tokens=100))
    together = client.start(OTHER_PROMPT, everyone[2], replace(GREEDY, max_tokens=100, tokens_at_a_time=8))
    assert_greedy((await one_by_one.end()).only, everyone[1], PROMPT)
    assert_greedy((await together.end()).only, everyone[2], OTHER_PROMPT)
    assert together.most_together >= 8


async def test_more_tokens_of_seeded_prompts_than_a_step_takes(client: Client, everyone: list[Adapted]) -> None:
    """Prompts that a step splits would kill the engine of a CPU, and everybody's samples with it."""
    beside = client.start(PROMPT, everyone[1], LONG)
    await beside.reached(1)
    asked = replace(GREEDY, temperature=1.0, max_tokens=2, seeds=(7,))
    await asyncio.gather(*(client.ask((OTHER_PROMPT * 200)[: 900 + n], everyone[2], asked) for n in range(5)))
    assert_greedy((await beside.end()).only, everyone[1], PROMPT)


async def test_scores_beside_running_streams(client: Client, everyone: list[Adapted]) -> None:
    """vLLM's own scores would kill the engine in company: the streams before and after go on all the same."""

    async def score(who: Adapted) -> None:
        drawn = await client.ask(PROMPT, who, GREEDY, scoring=PromptScoring(1, True, 0))
        expected = who.of_tokens(PROMPT[:1], PROMPT[1:])
        assert drawn.scored is not None
        assert drawn.scored.logprobs is not None
        np.testing.assert_allclose(drawn.scored.logprobs[1:], expected, atol=EXACT)
        assert_greedy(drawn.only, who, PROMPT)

    before = [client.start(PROMPT, who, LONG) for who in everyone[:3]]
    for running in before:
        await running.reached(1)
    scores = asyncio.gather(*(score(who) for who in everyone))
    after = [client.start(OTHER_PROMPT, who, LONG) for who in everyone[:3]]
    left = client.start(OTHER_PROMPT, everyone[1], LONG)
    await asyncio.gather(before[0].end(), left.leave())
    await scores
    for runs, prompt in ((before, PROMPT), (after, OTHER_PROMPT)):
        for running, who in zip(runs, everyone, strict=False):
            assert_greedy((await running.end()).only, who, prompt)


async def test_streams_that_are_left_beside_a_prompt_that_is_scored(client: Client, world: Any) -> None:
    for _ in range(5):
        running = client.start(PROMPT, world.cat, replace(LONG, seeds=(None,) * 3))
        await running.reached(1)
        scoring = client.start(PROMPT, world.dog, GREEDY, scoring=PromptScoring(1, True, 0))
        await running.leave()
        assert_greedy((await scoring.end()).only, world.dog, PROMPT)


async def test_no_score_holds_the_server_up(settings: VllmReplicaSettings, world: Any) -> None:
    """While prompts wait for the trainer's forward, streams go on and new ones begin; a request that waits can be cut."""
    forward = HeldForward(world.base)
    scored = PromptScoring(1, logprobs=True, topk=0)
    async with serving(settings, forward) as client:
        running = client.start(PROMPT, world.cat, LONG)
        await running.reached(1)
        waiting = client.start(PROMPT, world.dog, GREEDY, scoring=scored)
        cut = client.start(PROMPT, world.dog, replace(GREEDY, seeds=(None, None)), scoring=scored)
        assert_greedy((await client.ask(PROMPT, world.dog, GREEDY)).only, world.dog, PROMPT)
        await cut.cut_at_once()
        drawn = await cut.end()
        assert [(sequence.ids, sequence.reason) for sequence in drawn.sequences] == [([], "cut")] * 2
        assert drawn.scored is None
        assert_greedy((await running.end()).only, world.cat, PROMPT)
        forward.may.set()
        assert_greedy((await waiting.end()).only, world.dog, PROMPT)
    await forward.close()


async def test_only_stop_tokens_stop(client: Client, world: Any) -> None:
    """The end-of-sequence token is one like any other, unless it is asked for."""
    hot = replace(GREEDY, temperature=2.0, max_tokens=400, seeds=(1, 2, 3))
    free = await client.ask(PROMPT, world.bare, hot)
    assert any(END_OF_TEXT in sequence.ids for sequence in free.sequences)
    assert {sequence.reason for sequence in free.sequences} == {"length"}
    stopped = await client.ask(PROMPT, world.bare, replace(hot, stop_tokens=frozenset({END_OF_TEXT, 10**6})))
    for sequence, whole in zip(stopped.sequences, free.sequences, strict=True):
        end = whole.ids.index(END_OF_TEXT) + 1 if END_OF_TEXT in whole.ids else None
        assert sequence.ids == whole.ids[:end]
        assert sequence.reason == ("length" if end is None else "stop")


async def test_salts_change_nothing_but_the_cache(client: Client, world: Any) -> None:
    long_prompt = PROMPT * 60
    for salt in (None, "", "tenant"):
        request = replace(client.request(long_prompt, world.cat, GREEDY), cache_salt=salt)
        tokens = [e.token async for events in client.replica.generate(request) for e in events if hasattr(e, "token")]
        assert tokens == world.cat.greedy(long_prompt, 24)


async def test_what_the_server_would_not_do_is_refused(client: Client, world: Any) -> None:
    nineteen = await client.ask(PROMPT, world.cat, GREEDY, topk=19, scoring=PromptScoring(1, False, 20))
    assert nineteen.only.topk is not None
    with pytest.raises(InvalidRequest, match=r"topk.*19"):
        await client.ask(PROMPT, world.cat, GREEDY, topk=20)
    with pytest.raises(InvalidRequest, match=r"scoring.*20"):
        await client.ask(PROMPT, world.cat, GREEDY, scoring=PromptScoring(1, False, 21))
    with pytest.raises(InvalidRequest, match="temperature"):
        await client.ask(PROMPT, world.cat, replace(GREEDY, temperature=2.1))
    with pytest.raises(InvalidRequest, match="refused"):
        await client.ask(PROMPT, world.cat, replace(GREEDY, top_k=-5))
