"""Cutting and joining operations changes no number: pieces of one operation, several of one run, one of them failing.

Tolerances: 1e-5 relative to the largest value of the matrix compared, fp32.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from contracts.errors import InvalidRequest, WeftError
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, OptimStep, TrainingBatch
from engine.training.pass_operation import PassItem, PassOperation
from engine.training.trainer import Trainer
from tests.engine.training.conftest import (
    NEIGHBOUR,
    RUN,
    backward,
    gradients_of,
    make_batch,
    randomise,
    settings,
)

REFERENCE = RunId("reference:train:0")
EIGHT = (4, 8, 6, 5, 7, 3, 9, 2)


@pytest.fixture
def adapters(trainer: Trainer) -> Trainer:
    """A run and its reference of equal weights, and a neighbour of another layout."""
    for run, seed in ((RUN, 1), (REFERENCE, 1), (NEIGHBOUR, 2)):
        trainer.create(run, settings(rank=8 if seed == 1 else 3, seed=seed, train_unembed=seed == 1))
        randomise(trainer, run, seed)
    return trainer


def output(outcome: ForwardBackwardOutput | WeftError | None) -> ForwardBackwardOutput:
    """The output of an operation that must have worked."""
    assert isinstance(outcome, ForwardBackwardOutput), outcome
    return outcome


def assert_same(ours: ForwardBackwardOutput, theirs: ForwardBackwardOutput) -> None:
    """Equal losses and logprobs, in order."""
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5, abs=1e-5)
    assert ours.metrics["tokens:sum"] == theirs.metrics["tokens:sum"]
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


def assert_same_gradients(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal, matrix by matrix."""
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine - other).abs().max()) <= 1e-5 * max(float(other.abs().max()), 1e-3)


def spoiled(batch: TrainingBatch) -> TrainingBatch:
    """The last sequence's ratios overflow: a loss that is not finite, found only once it is computed."""
    last = batch.data[-1]
    inputs = {**last.inputs, "logprobs": np.full(last.targets.shape, -1e6, np.float32)}
    return replace(batch, data=[*batch.data[:-1], replace(last, inputs=inputs)])


def test_an_operation_split_over_passes_equals_the_whole(adapters: Trainer) -> None:
    """An operation's gradient reaches the adapter with the last piece, not before; a neighbour is in every pass."""
    batch = make_batch(1, LossName.PPO, EIGHT)
    whole = output(adapters.run_pass([backward(REFERENCE, batch)])[0])
    operation = PassOperation(RUN, batch, backward=True)
    beside = make_batch(2, LossName.CROSS_ENTROPY, (6, 11))
    for number, count in enumerate((3, 1, 4)):
        assert operation.outcome is None
        assert adapters.state(RUN).gradient is None
        other = PassOperation(NEIGHBOUR, beside, backward=True)
        report = adapters.advance([other.next_piece(2), operation.next_piece(count)])
        assert (report.adapters, report.sequences) == (2, 2 + count)
        assert operation.computed == sum((3, 1, 4)[: number + 1])
        output(other.outcome)
    assert_same(output(operation.outcome), whole)
    assert_same_gradients(gradients_of(adapters, RUN), gradients_of(adapters, REFERENCE))


def test_consecutive_passes_of_one_run_joined_equal_one_after_another(adapters: Trainer) -> None:
    """``forward_backward`` of several losses and a ``forward``, between a neighbour's: outputs in order, one gradient."""
    losses = (LossName.CROSS_ENTROPY, LossName.PPO, LossName.DRO)
    batches = [make_batch(number, loss, (7, 12, 3)) for number, loss in enumerate(losses)]
    kinds = (True, False, True)
    one_by_one = [
        output(adapters.run_pass([PassItem(REFERENCE, batch, kind)])[0])
        for batch, kind in zip(batches, kinds, strict=True)
    ]
    items = [PassItem(RUN, batch, kind) for batch, kind in zip(batches, kinds, strict=True)]
    beside = backward(NEIGHBOUR, make_batch(9, LossName.CROSS_ENTROPY, (30, 2)))
    joined = adapters.run_pass([items[0], beside, *items[1:], beside])
    for number, expected in zip((0, 2, 3), one_by_one, strict=True):
        assert_same(output(joined[number]), expected)
    assert_same(output(joined[4]), output(joined[1]))
    assert_same_gradients(gradients_of(adapters, RUN), gradients_of(adapters, REFERENCE))


@pytest.mark.parametrize("kind", ["refused", "not finite"])
def test_a_failed_operation_adds_nothing_to_its_runs_gradient(adapters: Trainer, kind: str) -> None:
    """The operations before and after it in the same gradient window count, whole; so does a neighbour's."""
    batch, later = make_batch(3, LossName.IMPORTANCE_SAMPLING), make_batch(4, LossName.CROSS_ENTROPY)
    bad = (
        spoiled(batch)
        if kind == "not finite"
        else replace(batch, data=[*batch.data, replace(batch.data[0], inputs={})])
    )
    neighbours = make_batch(5, LossName.PPO, (5, 9))
    before, failed, after, beside = adapters.run_pass(
        [backward(RUN, batch), backward(RUN, bad), backward(RUN, later), backward(NEIGHBOUR, neighbours)]
    )
    assert isinstance(failed, InvalidRequest)
    expected = [output(adapters.run_pass([backward(REFERENCE, one)])[0]) for one in (batch, later)]
    assert_same(output(before), expected[0])
    assert_same(output(after), expected[1])
    assert_same_gradients(gradients_of(adapters, RUN), gradients_of(adapters, REFERENCE))
    in_company = gradients_of(adapters, NEIGHBOUR)
    adapters.put(NEIGHBOUR, replace(adapters.state(NEIGHBOUR), gradient=None))
    assert_same(output(beside), output(adapters.run_pass([backward(NEIGHBOUR, neighbours)])[0]))
    assert_same_gradients(in_company, gradients_of(adapters, NEIGHBOUR))


def test_an_operation_that_fails_in_a_later_pass_takes_its_earlier_pieces_back(adapters: Trainer) -> None:
    """The gradient window goes on: the next operations and the step are as if the failed one had never been sent."""
    bad = PassOperation(RUN, spoiled(make_batch(6, LossName.IMPORTANCE_SAMPLING, EIGHT)), backward=True)
    adapters.advance([bad.next_piece(5)])
    assert bad.outcome is None
    beside = PassOperation(NEIGHBOUR, make_batch(7, LossName.CROSS_ENTROPY), backward=True)
    adapters.advance([bad.next_piece(3), beside.next_piece(3)])
    assert isinstance(bad.outcome, InvalidRequest)
    assert bad.gradient is None
    assert adapters.state(RUN).gradient is None
    output(beside.outcome)
    for run in (RUN, REFERENCE):
        output(adapters.run_pass([backward(run, make_batch(8, LossName.PPO))])[0])
        adapters.optim_step(run, OptimStep())
    assert adapters.state(RUN).weights.vector.equal(adapters.state(REFERENCE).weights.vector)


@pytest.mark.parametrize("width", [None, 3], ids=["targets-N", "targets-NK"])
def test_the_bare_base_beside_its_adapter_and_a_neighbour(
    adapters: Trainer, tiny_model_dir: Path, width: int | None
) -> None:
    """The logprobs of a forward without the adapter are those of the base by transformers, and nobody else's change."""
    batch, others = make_batch(3, LossName.CROSS_ENTROPY, width=width), make_batch(4, LossName.PPO)
    bare = replace(batch, without_adapter=True)
    items = [PassItem(RUN, bare, False), PassItem(RUN, batch, False), backward(NEIGHBOUR, others)]
    found, own, beside = (output(one) for one in adapters.run_pass(items))
    alone = [output(adapters.run_pass([item])[0]) for item in items[1:]]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    for datum, logprobs, adapted in zip(batch.data, found.logprobs, own.logprobs, strict=True):
        with torch.no_grad():
            table = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].log_softmax(-1).numpy()
        expected = np.take_along_axis(table, datum.targets.reshape(len(datum.tokens), -1), 1).reshape(
            datum.targets.shape
        )
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
        assert np.abs(logprobs - adapted).max() > 1e-3
    for ours, theirs in zip((own, beside), alone, strict=True):
        assert_same(ours, theirs)


def test_the_bare_base_is_not_trained(adapters: Trainer) -> None:
    batch = replace(make_batch(3, LossName.CROSS_ENTROPY), without_adapter=True)
    refused, beside = adapters.run_pass([backward(RUN, batch), backward(NEIGHBOUR, make_batch(4, LossName.PPO))])
    assert isinstance(refused, InvalidRequest)
    assert adapters.state(RUN).gradient is None
    output(beside)
