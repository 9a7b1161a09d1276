"""Positions are computed alike in every call, whatever the lengths in it, by vLLM's rule."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import Datum, ForwardBackwardOutput, LoraSettings, LossSpec, TrainingBatch
from engine.training.trainer import PassItem, Trainer
from tests.engine.model.rotary_bases import ORIGINAL, OWN, config_of, load_base, write_base

MINE, NEIGHBOURS = RunId("mine:train:0"), RunId("neighbours:train:0")
TOLERANCE = 1e-5


def of_length(length: int, rows: int = 1) -> Tensor:
    """Token ids (rows, length)."""
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(length))


def batch_of(length: int) -> TrainingBatch:
    """A batch of one sequence."""
    tokens = of_length(length)[0].numpy()
    return TrainingBatch(LossSpec(LossName.CROSS_ENTROPY, {}), [Datum(tokens, np.roll(tokens, -1), {})])


def logprobs_of(result: object) -> np.ndarray:
    """Logprobs of the only sequence of a pass's item."""
    assert isinstance(result, ForwardBackwardOutput), result
    return result.logprobs[0]


@pytest.mark.parametrize("name", ["longrope", "mscale", "by layer", "dynamic"])
def test_a_neighbours_length_changes_no_number_of_a_pass(name: str, tmp_path: Path) -> None:
    """A pass is computed before it, beside it, and after it."""
    trainer = Trainer(load_base(write_base(config_of(name), tmp_path)), pass_token_budget=4096)
    for run in (MINE, NEIGHBOURS):
        trainer.create(run, LoraSettings(rank=4, seed=1, train_mlp=False))
    mine, theirs = batch_of(ORIGINAL - 4), batch_of(ORIGINAL + 6)
    before, beside, after = (
        logprobs_of(trainer.run_pass([PassItem(run, batch, True) for run, batch in items])[0])
        for items in ([(MINE, mine)], [(MINE, mine), (NEIGHBOURS, theirs)], [(MINE, mine)])
    )
    np.testing.assert_allclose(beside, before, atol=TOLERANCE)
    np.testing.assert_allclose(after, before, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["longrope", "mscale", "by layer", "dynamic"])
def test_a_sequence_has_the_same_numbers_before_and_after_a_longer_one(name: str, tmp_path: Path) -> None:
    base = load_base(write_base(config_of(name), tmp_path))
    with torch.no_grad():
        before = base.logits(of_length(ORIGINAL + 6))
        start = base.logits(of_length(ORIGINAL + 6)[:, :40])
        base.logits(of_length(200))
        torch.testing.assert_close(base.logits(of_length(ORIGINAL + 6)), before)
    torch.testing.assert_close(start, before[:, :40], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("context", "length"), [(ORIGINAL, ORIGINAL - 4), (OWN, ORIGINAL + 6)])
def test_longrope_has_the_factors_of_the_served_context(context: int, length: int, tmp_path: Path) -> None:
    """Plain transformers has the same ones for a sequence of that length."""
    folder = write_base(config_of("longrope"), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = of_length(length, rows=2)
    with torch.no_grad():
        expected = plain(tokens, use_cache=False).logits
        found = load_base(folder, context).logits(tokens)
        other = load_base(folder, ORIGINAL if context == OWN else OWN).logits(tokens)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert (other - expected).abs().max() > 0.01


def test_dynamic_has_the_frequencies_that_the_base_was_trained_with(tmp_path: Path) -> None:
    folder = write_base(config_of("dynamic"), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = load_base(folder)
    with torch.no_grad():
        base.logits(of_length(200))
        expected = plain(of_length(ORIGINAL), use_cache=False).logits
        torch.testing.assert_close(base.logits(of_length(ORIGINAL)), expected, atol=TOLERANCE, rtol=TOLERANCE)
