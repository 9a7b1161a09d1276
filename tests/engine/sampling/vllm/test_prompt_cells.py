"""Chosen tokens and draws at a prompt's positions, on a real vLLM server, and how much of a prompt its prefix cache had."""

from dataclasses import replace
from typing import Any

import numpy as np

from engine.sampling.replica import PromptScoring
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.test_prompt_cells import *  # noqa: F403

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
