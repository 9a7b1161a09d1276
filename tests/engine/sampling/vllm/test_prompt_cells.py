"""Chosen tokens and draws at a prompt's positions, on a real vLLM server, and how much of a prompt its prefix cache had."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.sampling.replica import PromptScoring
from engine.sampling.vllm.http import VllmHttp
from engine.sampling.vllm.sequence import GENERATE
from engine.sampling.vllm.settings import VllmReplicaSettings
from tests.engine.sampling import test_prompt_cells as on_every_replica
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.test_prompt_cells import *  # noqa: F403
from tests.engine.sampling.vllm.conftest import assert_greedy, serving

del client  # type: ignore[name-defined]  # noqa: F821

LONG = [int(token) for token in np.random.default_rng(7).integers(0, 256, 600)]
SHORT = replace(GREEDY, max_tokens=3, seeds=(None, None))


async def test_tokens_from_the_prefix_cache_are_counted_for_their_adapter_alone(world: Any, client: Client) -> None:
    first = await client.ask(LONG, world.cat, SHORT)
    again = await client.ask(LONG, world.cat, SHORT)
    neighbour = await client.ask(LONG, world.dog, SHORT)
    assert (first.cached, neighbour.cached) == (0, 0)
    assert 400 <= again.cached < len(LONG)
    longer = await client.ask([*LONG, *range(40)], world.cat, SHORT)
    assert longer.cached == again.cached


async def test_a_scored_prompt_counts_what_its_draw_or_its_first_probe_found(world: Any, client: Client) -> None:
    """The prompt's own scores come from the trainer's forward, since adapters may change the head here."""
    prompt = [*LONG[::-1][:500], 1]
    drawn = [await client.ask(prompt, world.cat, SHORT, scoring=PromptScoring(490, True, 0)) for _ in range(2)]
    assert drawn[0].cached == 0
    assert drawn[1].cached > 200
    cells = (np.array([500]), np.array([7]))
    chosen = await client.ask([*prompt, 2], world.cat, SHORT, scoring=PromptScoring(502, False, 0, cells))
    assert 200 < chosen.cached <= 500


async def test_many_cells_are_no_requests_of_the_server(
    world: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for each would hold everybody's samples up for minutes: they come from the trainer's forward."""
    posted, post = list[str](), VllmHttp.post

    async def noted(self: VllmHttp, path: str, body: Any, deadline_s: float | None) -> Any:
        posted.append(path)
        return await post(self, path, body, deadline_s)

    positions = np.arange(1, len(LONG))
    scoring = PromptScoring(len(LONG), False, 0, (positions, positions % 256), alternatives=3)
    beside = client.start(LONG[:9], world.dog, replace(GREEDY, max_tokens=60))
    await beside.reached(1)
    monkeypatch.setattr(VllmHttp, "post", noted)
    drawn = await client.ask(LONG, world.cat, replace(GREEDY, temperature=1.0, seeds=(3,)), scoring=scoring)
    assert GENERATE not in posted
    scored, table = drawn.scored, world.cat.logprobs(LONG, [])
    assert scored is not None
    assert scored.targets is not None
    assert scored.alternatives is not None
    np.testing.assert_allclose(scored.targets, table[positions, positions % 256], atol=1e-4)
    expected = np.take_along_axis(table[1 : len(LONG)], scored.alternatives.tokens, axis=1)
    np.testing.assert_allclose(scored.alternatives.logprobs, expected, atol=1e-4)
    assert_greedy((await beside.end()).only, world.dog, LONG[:9])


async def test_without_a_forward_the_server_draws_and_scores_them(settings: VllmReplicaSettings, world: Any) -> None:
    async with serving(settings) as alone:
        await on_every_replica.test_draws_at_positions_follow_the_models_distribution(world, alone)
        await on_every_replica.test_seeded_draws_repeat_and_greedy_ones_are_the_likeliest(world, alone)
        await on_every_replica.test_chosen_tokens_are_scored_at_chosen_positions(world, alone)
