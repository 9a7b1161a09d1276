"""Losses, logprobs, gradients and optimizer steps against plain PEFT, torch autograd and ``torch.optim``. fp32, CPU.

Tolerances: 1e-5 relative to the largest value of the tensor compared (1e-5 absolute for logprobs).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from contracts.errors import WeftError
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, LossSpec, OptimStep, OptimStepped
from engine.model.base import BaseModel
from engine.training.losses import flat_inputs, loss_terms
from engine.training.trainer import PassItem, Trainer
from tests.engine.training.conftest import (
    NEIGHBOUR,
    POLICY_LOSSES,
    RUN,
    backward,
    gradients_of,
    make_batch,
    matrices,
    randomise,
    reference_for,
    settings,
)


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    """Within ``tolerance`` of the largest reference value."""
    scale = max(float(theirs.abs().max()), 1e-3)
    assert float((ours - theirs).abs().max()) <= tolerance * scale


def output(result: ForwardBackwardOutput | WeftError) -> ForwardBackwardOutput:
    """The output of an item that must have worked."""
    assert isinstance(result, ForwardBackwardOutput), result
    return result


@pytest.mark.parametrize("heads", ["own", "neighbour's", "none"])
@pytest.mark.parametrize("width", [None, 3], ids=["targets-N", "targets-NK"])
@pytest.mark.parametrize("loss", [loss for loss in LossName if loss is not LossName.CUSTOM])
def test_loss_logprobs_and_gradients_equal_peft(
    trainer: Trainer, tiny_model_dir: Path, loss: LossName, width: int | None, heads: str
) -> None:
    """``heads``: whose adapter changes the unembedding. Where nobody's does, another derivation of the head runs."""
    trainer.create(RUN, settings(train_unembed=heads == "own"))
    trainer.create(NEIGHBOUR, settings(rank=3, seed=9, train_unembed=heads == "neighbour's"))
    randomise(trainer, RUN, 5)
    randomise(trainer, NEIGHBOUR, 6)
    reference = reference_for(trainer, RUN, tiny_model_dir)
    batch = make_batch(1, loss, width=width)
    neighbour = make_batch(2, LossName.CROSS_ENTROPY, (5, 9))
    result = output(trainer.run_pass([backward(NEIGHBOUR, neighbour), backward(RUN, batch)])[1])

    expected = reference.loss(batch)
    gradients = torch.autograd.grad(expected, reference.parameters)
    assert result.metrics["loss:sum"] == pytest.approx(float(expected.detach()), rel=1e-5)
    for datum, logprobs in zip(batch.data, result.logprobs, strict=True):
        assert logprobs.shape == datum.targets.shape
        np.testing.assert_allclose(logprobs, reference.logprobs(datum).detach().numpy(), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients_of(trainer, RUN), gradients, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("loss", [LossName.PPO, LossName.CISPO])
def test_clip_thresholds_come_from_config_or_per_token(trainer: Trainer, tiny_model_dir: Path, loss: LossName) -> None:
    trainer.create(RUN, settings())
    reference = reference_for(trainer, RUN, tiny_model_dir)
    batch = make_batch(3, loss)
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
    configured = replace(batch, loss=LossSpec(loss, config))
    expected = float(reference.loss(configured).detach())
    per_token = replace(
        batch,
        data=[
            replace(
                datum,
                inputs={
                    **datum.inputs,
                    **{name: np.full(datum.targets.shape, value, np.float32) for name, value in config.items()},
                },
            )
            for datum in batch.data
        ],
    )
    default = output(trainer.run_pass([PassItem(RUN, batch, False)])[0]).metrics["loss:sum"]
    for given in (configured, per_token):
        got = output(trainer.run_pass([PassItem(RUN, given, False)])[0]).metrics["loss:sum"]
        assert got == pytest.approx(expected, rel=1e-5)
        assert got != pytest.approx(default, rel=1e-4)


def test_cispo_bounds_ratios_from_above_alone(trainer: Trainer) -> None:
    """A token that the policy has left far behind counts as little as its ratio says, as the hosted service's default has it."""
    trainer.create(RUN, settings())
    batch = make_batch(3, LossName.CISPO)
    logp = output(trainer.run_pass([PassItem(RUN, batch, False)])[0]).logprobs
    ratios = np.float32([0.001, 10.0])
    data = [
        replace(
            datum,
            inputs={
                "logprobs": found - np.resize(np.log(ratios), found.shape),
                "advantages": np.full(found.shape, -1.0, np.float32),
            },
        )
        for datum, found in zip(batch.data, logp, strict=True)
    ]
    expected = sum(float((np.resize(ratios.clip(0.0, 4.0), found.shape) * found).sum()) for found in logp)
    got = output(trainer.run_pass([PassItem(RUN, replace(batch, data=data), False)])[0]).metrics["loss:sum"]
    assert got == pytest.approx(expected, rel=1e-4)


def test_dro_beta_comes_from_config(trainer: Trainer, tiny_model_dir: Path) -> None:
    trainer.create(RUN, settings())
    batch = replace(make_batch(4, LossName.DRO), loss=LossSpec(LossName.DRO, {"beta": 2.0}))
    expected = reference_for(trainer, RUN, tiny_model_dir).loss(batch)
    got = output(trainer.run_pass([PassItem(RUN, batch, False)])[0]).metrics["loss:sum"]
    assert got == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("config", [{"kl_coeff": 0.0}, {"kl_coeff": 3.0, "ratio_cap": 1.1}], ids=["no-kl", "kl"])
def test_stable_reinforce_truncates_ratios_and_divergence(
    trainer: Trainer, tiny_model_dir: Path, config: dict[str, float]
) -> None:
    """Ratios on both sides of the cap; prompt tokens (logprob and advantage 0) add nothing."""
    trainer.create(RUN, settings())
    randomise(trainer, RUN, 5)
    reference = reference_for(trainer, RUN, tiny_model_dir)
    batch = replace(make_batch(4, LossName.STABLE_REINFORCE), loss=LossSpec(LossName.STABLE_REINFORCE, config))
    for datum in batch.data:
        for values in datum.inputs.values():
            values[0] = 0.0
    result = output(trainer.run_pass([backward(RUN, batch)])[0])
    expected = reference.loss(batch)
    assert result.metrics["loss:sum"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert result.metrics["ratio:max"] > 1.2
    for ours, theirs in zip(
        gradients_of(trainer, RUN), torch.autograd.grad(expected, reference.parameters), strict=True
    ):
        assert_close(ours, theirs)


def test_gspo_weighs_a_sequence_by_itself_bit_for_bit(trainer: Trainer) -> None:
    """A sequence alone, and between other sequences and a neighbour's of the same loss."""
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings(train_unembed=False))
    batch = make_batch(6, LossName.GSPO, (9, 9))
    unmarked = replace(batch.data[1], inputs={**batch.data[1].inputs, "sequence_ratio_mask": np.zeros(9, np.float32)})
    batch = replace(batch, data=[batch.data[0], unmarked])
    spec = batch.loss
    logp = torch.from_numpy(np.concatenate([datum.inputs["logprobs"] for datum in batch.data])) + 0.1
    whole = loss_terms(spec, logp, as_tensors(flat_inputs(spec, batch.data)))
    parts = [
        loss_terms(spec, logp[start : start + 9], as_tensors(flat_inputs(spec, [datum])))
        for start, datum in zip((0, 9), batch.data, strict=True)
    ]
    assert torch.equal(whole, torch.cat(parts))
    expected = -torch.from_numpy(batch.data[1].inputs["advantages"])
    assert torch.equal(parts[1], expected), "no marked token: the ratio is 1"


def test_gspo_without_a_mask_marks_the_sampled_tokens() -> None:
    """Beside a sequence that has a mask, and alone."""
    batch = make_batch(6, LossName.GSPO, (9, 9))
    inputs = {**batch.data[0].inputs}
    del inputs["sequence_ratio_mask"]
    for name in ("logprobs", "advantages"):
        inputs[name] = np.where(np.arange(9) < 3, 0, inputs[name]).astype(np.float32)
    marked = replace(batch.data[0], inputs={**inputs, "sequence_ratio_mask": (np.arange(9) >= 3).astype(np.float32)})
    unmarked = replace(batch.data[0], inputs=inputs)
    for beside in ([], [batch.data[1]]):
        logp = torch.from_numpy(np.concatenate([datum.inputs["logprobs"] for datum in (marked, *beside)])) + 0.1
        terms = [
            loss_terms(batch.loss, logp, as_tensors(flat_inputs(batch.loss, [first, *beside])))
            for first in (marked, unmarked)
        ]
        assert torch.equal(*terms)


def as_tensors(inputs: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The inputs as a micro-batch has them."""
    return {name: torch.from_numpy(values) for name, values in inputs.items()}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_policy_losses_tell_how_far_the_sampling_policy_is(trainer: Trainer, loss: LossName) -> None:
    """Two of six sampled tokens are just outside 0.9 to 1.1, and two just within; the prompt's three count nowhere."""
    trainer.create(RUN, settings())
    trainer.create(NEIGHBOUR, settings(seed=3))
    drift = np.log([1, 1, 1, 1.09, 0.91, 1.11, 0.89, 1.01, 1])
    blank = make_batch(9, loss, (9,))
    (now,) = output(trainer.run_pass([PassItem(RUN, blank, False)])[0]).logprobs
    is_prompt = np.arange(9) < 3
    inputs = {
        **blank.data[0].inputs,
        "logprobs": np.where(is_prompt, 0, now - drift).astype(np.float32),
        "advantages": (~is_prompt).astype(np.float32),
    }
    if loss is LossName.GSPO:
        inputs["sequence_ratio_mask"] = (~is_prompt).astype(np.float32)
    batch = replace(blank, data=[replace(blank.data[0], inputs=inputs)])
    supervised = make_batch(2, LossName.CROSS_ENTROPY)
    ours, beside = trainer.run_pass([backward(RUN, batch), backward(NEIGHBOUR, supervised)])
    metrics = output(ours).metrics
    assert metrics["sampled_tokens:sum"] == 6
    assert metrics["ratio_outside:mean"] == pytest.approx(2 / 6)
    assert metrics["ratio:max"] == pytest.approx(1.11, rel=1e-5)
    sampled = drift[3:]
    assert metrics["sampling_kl:mean"] == pytest.approx(float(np.mean(np.exp(sampled) - 1 - sampled)), rel=1e-3)
    assert set(output(beside).metrics) == {"loss:sum", "tokens:sum"}


@pytest.mark.parametrize(
    ("loss", "inputs", "metric"),
    [
        (LossName.CROSS_ENTROPY, ("weights",), "weights:sum"),
        (LossName.PPO, ("logprobs", "advantages"), "sampled_tokens:sum"),
    ],
)
def test_a_batch_that_counts_nothing_tells_so(
    trainer: Trainer, loss: LossName, inputs: tuple[str, ...], metric: str
) -> None:
    """The SDK leaves a metric that one request lacks out of the whole call."""
    trainer.create(RUN, settings())
    batch = make_batch(4, loss, (5,))
    empty = replace(batch.data[0], inputs={name: np.zeros(5, np.float32) for name in inputs})
    (result,) = trainer.run_pass([backward(RUN, replace(batch, data=[empty]))])
    assert output(result).metrics == {"loss:sum": 0.0, "tokens:sum": 5.0, metric: 0.0}


def test_cross_entropy_without_weights_weighs_every_target_one(trainer: Trainer) -> None:
    trainer.create(RUN, settings())
    batch = make_batch(5, LossName.CROSS_ENTROPY)
    bare = replace(batch, data=[replace(datum, inputs={}) for datum in batch.data])
    result = output(trainer.run_pass([PassItem(RUN, bare, False)])[0])
    assert result.metrics["loss:sum"] == pytest.approx(-sum(float(row.sum()) for row in result.logprobs), rel=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_ten_steps_equal_torch_adamw(trainer: Trainer, clip: float, decay: float) -> None:
    """The same gradients go into both; beside it a neighbour steps wildly."""
    trainer.create(RUN, settings())
    trainer.create(NEIGHBOUR, settings(seed=2))
    parameters = [tensor.detach().clone().requires_grad_() for tensor in matrices(trainer, RUN)]
    step = OptimStep(learning_rate=2e-3, beta1=0.8, beta2=0.97, eps=1e-8, weight_decay=decay, grad_clip_norm=clip)
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.8, 0.97), eps=1e-8, weight_decay=decay)
    for number in range(10):
        batch = make_batch(10 + number, LossName.CROSS_ENTROPY)
        trainer.run_pass([backward(RUN, batch), backward(NEIGHBOUR, make_batch(50 + number, LossName.CROSS_ENTROPY))])
        for parameter, gradient in zip(parameters, gradients_of(trainer, RUN), strict=True):
            parameter.grad = gradient.clone()
        if clip > 0:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        outcomes = trainer.optim_steps([(NEIGHBOUR, OptimStep(learning_rate=0.5, weight_decay=0.5)), (RUN, step)])
        assert all(isinstance(outcome, OptimStepped) for outcome in outcomes)
    for ours, theirs in zip(matrices(trainer, RUN), parameters, strict=True):
        assert_close(ours.detach(), theirs.detach())


@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
def test_one_operation_of_eight_sequences_equals_two_of_four(trainer: Trainer, head: bool) -> None:
    """Losses, logprobs and gradients; beside each operation runs a neighbour's."""
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings(train_unembed=head))
        randomise(trainer, run, 5)
    batch = make_batch(6, LossName.PPO, (4, 8, 6, 5, 7, 3, 9, 2))
    beside = backward(NEIGHBOUR, make_batch(7, LossName.CROSS_ENTROPY, (5, 11)))
    whole = output(trainer.run_pass([beside, backward(RUN, batch)])[1])
    gradients = gradients_of(trainer, RUN)
    trainer.put(RUN, replace(trainer.state(RUN), gradient=None))
    halves = [
        output(trainer.run_pass([backward(RUN, replace(batch, data=data)), beside])[0])
        for data in (batch.data[:4], batch.data[4:])
    ]
    assert sum(half.metrics["loss:sum"] for half in halves) == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
    for ours, theirs in zip([*halves[0].logprobs, *halves[1].logprobs], whole.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for one, other in zip(gradients_of(trainer, RUN), gradients, strict=True):
        assert_close(one, other)


def test_gradients_accumulate_until_the_step_clears_them(trainer: Trainer) -> None:
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
        trainer.run_pass([backward(run, make_batch(6, LossName.CROSS_ENTROPY))])
    once = gradients_of(trainer, RUN)
    trainer.run_pass([backward(RUN, make_batch(6, LossName.CROSS_ENTROPY))])
    for ours, theirs in zip(gradients_of(trainer, RUN), once, strict=True):
        assert_close(ours, 2 * theirs)
    trainer.optim_step(RUN, OptimStep())
    assert trainer.state(RUN).gradient is None
    assert trainer.state(NEIGHBOUR).gradient is not None


def test_step_without_gradients_counts_as_zero_gradients(trainer: Trainer) -> None:
    trainer.create(RUN, settings())
    before = [tensor.detach().clone() for tensor in matrices(trainer, RUN)]
    assert trainer.optim_step(RUN, OptimStep()).metrics["grad_norm:max"] == 0.0
    for ours, was in zip(matrices(trainer, RUN), before, strict=True):
        assert torch.equal(ours, was)


def test_long_heads_are_chunked_with_the_same_numbers(
    trainer: Trainer, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.create(RUN, settings())
    trainer.create(NEIGHBOUR, settings(seed=4, rank=4))
    items = [
        backward(NEIGHBOUR, make_batch(7, LossName.PPO, (9, 4), width=2)),
        backward(RUN, make_batch(8, LossName.CROSS_ENTROPY, (11, 6, 2))),
    ]
    whole = [output(result) for result in trainer.run_pass(items)]
    gradients = [gradient.clone() for gradient in gradients_of(trainer, RUN)]
    trainer.create(RUN, settings())
    trainer.create(NEIGHBOUR, settings(seed=4, rank=4))
    monkeypatch.setattr("engine.training.target_logprobs.CHUNK_LOGITS", 5 * base.facts.vocabulary_size)
    for chunked, expected in zip(trainer.run_pass(items), whole, strict=True):
        assert output(chunked).metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    for ours, theirs in zip(gradients_of(trainer, RUN), gradients, strict=True):
        assert_close(ours, theirs)


def test_policy_losses_start_at_minus_advantages(trainer: Trainer) -> None:
    trainer.create(RUN, settings())
    for loss in POLICY_LOSSES[:2]:
        batch = make_batch(9, loss)
        now = output(trainer.run_pass([PassItem(RUN, batch, False)])[0]).logprobs
        fresh = replace(
            batch,
            data=[
                replace(datum, inputs={**datum.inputs, "logprobs": logprobs})
                for datum, logprobs in zip(batch.data, now, strict=True)
            ],
        )
        expected = -sum(float(datum.inputs["advantages"].sum()) for datum in fresh.data)
        got = output(trainer.run_pass([PassItem(RUN, fresh, False)])[0]).metrics["loss:sum"]
        assert got == pytest.approx(expected, abs=1e-4)
