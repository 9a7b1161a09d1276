"""Choosing tokens: the whole distribution is checked by sweeping the uniform, so nothing here is random."""

import numpy as np
import pytest
import torch

from contracts.operations import SamplingParams
from engine.sampling.in_process.token_choice import ChoiceRules, choose_tokens, uniform_stream

GRID = 4000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0, -torch.inf])


def frequencies(params: SamplingParams, logits: torch.Tensor = LOGITS) -> np.ndarray:
    uniforms = [(i + 0.5) / GRID for i in range(GRID)]
    rules = ChoiceRules((params,) * GRID, torch.device("cpu"))
    tokens = choose_tokens(logits.expand(GRID, -1), rules, uniforms)
    return np.bincount(tokens.numpy(), minlength=len(logits)) / GRID


def expected(kept: list[int], temperature: float = 1.0) -> np.ndarray:
    logits = torch.full_like(LOGITS, -torch.inf)
    logits[kept] = LOGITS[kept]
    return (logits / temperature).softmax(-1).numpy()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_scales_the_distribution(temperature: float) -> None:
    found = frequencies(SamplingParams(temperature=temperature))
    np.testing.assert_allclose(found, expected([0, 1, 2, 3, 4], temperature), atol=2 / GRID)


@pytest.mark.parametrize(("top_k", "kept"), [(2, [0, 3]), (3, [0, 2, 3]), (100, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4])])
def test_top_k_keeps_the_k_most_likely(top_k: int, kept: list[int]) -> None:
    np.testing.assert_allclose(frequencies(SamplingParams(top_k=top_k)), expected(kept), atol=2 / GRID)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, [3]), (0.65, [3]), (0.7, [0, 3]), (0.92, [0, 2, 3]), (0.999, [0, 1, 2, 3, 4])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: list[int]) -> None:
    np.testing.assert_allclose(frequencies(SamplingParams(top_p=top_p)), expected(kept), atol=2 / GRID)


def test_top_p_works_on_what_top_k_leaves() -> None:
    # Of the two that are left, the first has 0.73 of the mass.
    np.testing.assert_allclose(frequencies(SamplingParams(top_k=2, top_p=0.72)), expected([3]), atol=2 / GRID)
    np.testing.assert_allclose(frequencies(SamplingParams(top_k=2, top_p=0.75)), expected([0, 3]), atol=2 / GRID)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=1e-38)]
)
def test_greedy_forms_take_the_most_likely(params: SamplingParams) -> None:
    assert frequencies(params)[3] == 1


def test_rows_keep_their_own_rules_when_mixed() -> None:
    mixed = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5, temperature=2.0),
    ]
    uniforms = [0.2, 0.99, 0.01, 0.6]
    together = choose_tokens(LOGITS.expand(4, -1), ChoiceRules(tuple(mixed), LOGITS.device), uniforms)
    alone = [
        choose_tokens(LOGITS[None], ChoiceRules((p,), LOGITS.device), [u]) for p, u in zip(mixed, uniforms, strict=True)
    ]
    assert together.tolist() == [int(token) for token in alone]


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_uniform_never_give_an_impossible_token(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])
    assert int(choose_tokens(logits, ChoiceRules((SamplingParams(),), logits.device), [uniform])) in (1, 2)


def test_streams_differ_by_seed_and_repeat() -> None:
    draws = {seed: tuple(uniform_stream(seed).random(4)) for seed in (-3, 0, 3, 2**63, -(2**63))}
    assert len(set(draws.values())) == len(draws)
    assert tuple(uniform_stream(3).random(4)) == draws[3]
    assert tuple(uniform_stream(None).random(4)) != tuple(uniform_stream(None).random(4))
