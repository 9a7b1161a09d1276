"""A base in float16: small slopes keep their precision, although float16 has nothing below 6e-8."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, TrainingBatch
from engine.model.base import BaseModel
from engine.training.trainer import Trainer
from tests.engine.training.conftest import NEIGHBOUR, RUN, backward, make_batch, randomise, settings
from tests.engine.training.test_other_bases import load_base


def weighted(batch: TrainingBatch, scale: float) -> TrainingBatch:
    """The batch with its weights multiplied by a power of two."""
    data = [replace(datum, inputs={"weights": datum.inputs["weights"] * scale}) for datum in batch.data]
    return replace(batch, data=data)


def gradient(base: BaseModel, scale: float, *, of_neighbour: float, trains_head: bool) -> Tensor:
    """The run's gradient beside a neighbour whose weights are scaled, too, over ``scale``."""
    trainer = Trainer(base)
    for seed, (run, rank) in enumerate(((NEIGHBOUR, 3), (RUN, 4))):
        trainer.create(run, settings(rank=rank, seed=9, train_unembed=trains_head))
        randomise(trainer, run, seed)
    own, beside = (make_batch(seed, LossName.CROSS_ENTROPY, (40, 17)) for seed in (3, 4))
    items = [backward(NEIGHBOUR, weighted(beside, of_neighbour)), backward(RUN, weighted(own, scale))]
    for result in trainer.run_pass(items):
        assert isinstance(result, ForwardBackwardOutput), result
    found = trainer.state(RUN).gradient
    assert found is not None
    return found / scale


@pytest.mark.parametrize("trains_head", [True, False])
def test_float16_gradients_are_as_exact_for_small_and_large_weights(tiny_model_dir: Path, *, trains_head: bool) -> None:
    """A batch's mean over many tokens weighs each by little; a neighbour's weights change no bit."""
    exact = gradient(load_base(tiny_model_dir, dtype="float32"), 1.0, of_neighbour=1.0, trains_head=trains_head)
    base = load_base(tiny_model_dir, dtype="float16")
    expected = gradient(base, 1.0, of_neighbour=1.0, trains_head=trains_head)
    assert float(torch.dist(expected, exact)) < 0.01 * float(exact.norm())
    for scale, of_neighbour in ((2.0**-20, 1.0), (2.0**14, 2.0**-20)):
        found = gradient(base, scale, of_neighbour=of_neighbour, trains_head=trains_head)
        assert torch.equal(found, expected)


def test_the_smallest_weights_of_float32_are_no_error_in_float16(tiny_model_dir: Path) -> None:
    """No factor makes such a slope one, and its gradient is about zero; the neighbour's is what it always is."""
    base = load_base(tiny_model_dir, dtype="float16")
    usual = gradient(base, 1.0, of_neighbour=1.0, trains_head=True)
    assert torch.equal(gradient(base, 1.0, of_neighbour=2.0**-140, trains_head=True), usual)
    assert bool(gradient(base, 2.0**-140, of_neighbour=1.0, trains_head=True).isfinite().all())
