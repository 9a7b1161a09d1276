"""Scores of chosen tokens at a prompt's positions, and draws there, on every replica, beside other adapters' requests."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.sampling.replica import PromptScoring
from tests.engine.sampling.drawing import GREEDY, Client, Drawn
from tests.engine.sampling.replicas import REPLICAS

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
NOWHERE = len(PROMPT)
SHORT = replace(GREEDY, max_tokens=6)
ONE = replace(GREEDY, max_tokens=1)
TOLERANCE = 1e-4  # to the reference
DRAWS = 256
CELLS = (np.array([1, 1, 4, 7]), np.array([0, 255, 108, 32]))


@pytest.fixture(params=REPLICAS)
async def client(request: pytest.FixtureRequest, world: Any) -> AsyncIterator[Client]:
    async with REPLICAS[request.param](world) as replica:
        yield Client(replica)


async def test_chosen_tokens_are_scored_at_chosen_positions(world: Any, client: Client) -> None:
    """Each adapter's scores are its own, while the others' requests are in the same batch with their likeliest tokens."""
    scoring = PromptScoring(NOWHERE, False, 0, CELLS)
    asked = [client.ask(PROMPT, who, SHORT, scoring=scoring) for who in world.everyone]
    beside = [client.ask(PROMPT, who, SHORT, topk=3) for who in world.everyone]
    drawn: list[Drawn] = await asyncio.gather(*asked, *beside)
    for one, who in zip(drawn, [*world.everyone] * 2, strict=True):
        assert one.only.ids == who.greedy(PROMPT, 6)
    for one, who in zip(drawn[:3], world.everyone, strict=True):
        assert one.scored is not None
        assert one.scored.targets is not None
        assert (one.scored.logprobs, one.scored.topk, one.scored.alternatives) == (None, None, None)
        table = who.logprobs(PROMPT, [])
        np.testing.assert_allclose(one.scored.targets, table[CELLS], atol=TOLERANCE)
    for one, who in zip(drawn[3:], world.everyone, strict=True):
        assert one.only.topk is not None
        likeliest = -np.sort(-who.logprobs(PROMPT, one.only.ids)[len(PROMPT) :], axis=1)[:, :3]
        np.testing.assert_allclose(one.only.topk.logprobs, likeliest, atol=TOLERANCE)


async def test_chosen_tokens_come_with_the_prompts_own_scores(world: Any, client: Client) -> None:
    scoring = PromptScoring(len(PROMPT) - 2, True, 2, CELLS)
    scored = (await client.ask(PROMPT, world.cat, ONE, scoring=scoring)).scored
    table = world.cat.logprobs(PROMPT, [])
    assert scored is not None
    assert scored.logprobs is not None
    assert scored.targets is not None
    np.testing.assert_allclose(scored.targets, table[CELLS], atol=TOLERANCE)
    assert np.isnan(scored.logprobs[: len(PROMPT) - 2]).all()
    own = table[np.arange(len(PROMPT)), PROMPT][-2:]
    np.testing.assert_allclose(scored.logprobs[-2:], own, atol=TOLERANCE)


async def test_draws_at_positions_follow_the_models_distribution(world: Any, client: Client) -> None:
    """``DRAWS`` draws at one position come as often as they are likely: a chi-square over the eight likeliest and the rest."""
    draw = replace(ONE, temperature=0.5, seeds=(3,))
    prompt = PROMPT[:2]
    scored = (await client.ask(prompt, world.cat, draw, scoring=PromptScoring(2, False, 0, None, DRAWS))).scored
    assert scored is not None
    assert scored.alternatives is not None
    tokens, logprobs = scored.alternatives.tokens, scored.alternatives.logprobs
    assert (tokens.shape, tokens.dtype, logprobs.dtype) == ((1, DRAWS), np.int64, np.float32)
    row = world.cat.logprobs(prompt, [])[1]
    # The reported logprobs are the model's own, whatever the temperature.
    np.testing.assert_allclose(logprobs[0], row[tokens[0]], atol=TOLERANCE)
    scaled = np.exp(row / 0.5) / np.exp(row / 0.5).sum()
    likeliest = np.argsort(-scaled)[:8]
    expected = np.append(scaled[likeliest], 1 - scaled[likeliest].sum()) * DRAWS
    seen = np.array([(tokens[0] == token).sum() for token in likeliest])
    found = np.append(seen, DRAWS - seen.sum())
    # Beyond 31.8 once in ten thousand seeds of eight degrees of freedom; this seed is one.
    assert ((found - expected) ** 2 / expected).sum() < 31.8


async def test_seeded_draws_repeat_and_greedy_ones_are_the_likeliest(world: Any, client: Client) -> None:
    scoring = PromptScoring(NOWHERE, False, 0, None, 3)
    drawn = await asyncio.gather(
        *(client.ask(PROMPT, world.dog, replace(ONE, temperature=2.0, seeds=(5,)), scoring=scoring) for _ in range(2)),
        client.ask(PROMPT, world.dog, replace(ONE, temperature=2.0, seeds=(6,)), scoring=scoring),
        client.ask(PROMPT, world.dog, ONE, scoring=scoring),
    )
    first, again, other, greedy = (one.scored.alternatives.tokens for one in drawn)  # type: ignore[union-attr]
    assert first.tolist() == again.tolist() != other.tolist()
    assert first.shape == (len(PROMPT) - 1, 3)
    likeliest = world.dog.logprobs(PROMPT, [])[1:].argmax(1)
    assert greedy.tolist() == [[token] * 3 for token in likeliest.tolist()]
