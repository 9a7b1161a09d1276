"""Faults of the machine under custom losses: traps of the processor, threads, memory, and arguments of any shape."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from contracts.custom_loss import loss_id_of, read_custom_loss
from contracts.errors import InvalidRequest
from contracts.losses import LossName
from contracts.operations import Datum
from engine.training import custom_loss
from engine.training.custom_loss import evaluate
from engine.training.trainer import Trainer
from tests.custom_losses import INPUTS, LOGP, call, nodes
from tests.engine.training.conftest import NEIGHBOUR, RUN, backward, make_batch, settings
from tests.engine.training.test_custom_losses import output, traced, uploaded

LEAST = [
    call("high", "operator.mul", LOGP, {"float": "inf"}),
    call("least", "long", {"ref": "high"}, op="call_method"),
    call("same", "operator.eq", LOGP, LOGP),
    call("one", "long", {"ref": "same"}, op="call_method"),
    call("minus", "operator.neg", {"ref": "one"}),
]
"""Nodes of the least int64 and of -1."""
PAIR = [{"ref": "least"}, {"ref": "minus"}]
DIVISIONS: dict[str, dict[str, Any]] = {
    "torch.div, trunc": call("found", "torch.div", *PAIR, rounding_mode="trunc"),
    "torch.div, floor": call("found", "torch.div", *PAIR, rounding_mode="floor"),
    "torch.divide": call("found", "torch.divide", PAIR[0], other=PAIR[1], rounding_mode="trunc"),
    "div": call("found", "div", *PAIR, op="call_method", rounding_mode="trunc"),
    "divide": call("found", "divide", *PAIR, op="call_method", rounding_mode="trunc"),
    "torch.fmod": call("found", "torch.fmod", *PAIR),
    "fmod": call("found", "fmod", *PAIR, op="call_method"),
    "torch.remainder": call("found", "torch.remainder", *PAIR),
    "remainder": call("found", "remainder", PAIR[0], -1, op="call_method"),
    "//": call("found", "operator.floordiv", *PAIR),
    "// -1": call("found", "operator.floordiv", PAIR[0], -1),
    "%": call("found", "operator.mod", *PAIR),
    "a bool": call("found", "operator.mod", PAIR[0], {"ref": "same"}),
}


@pytest.mark.parametrize("division", DIVISIONS.values(), ids=DIVISIONS)
def test_tensors_of_integers_are_not_divided(trainer: Trainer, division: dict[str, Any]) -> None:
    """The processor would trap, which ends the trainer of all tenants."""
    graph = nodes(*LEAST, division, call("loss", "torch.sum", LOGP))
    batch, neighbours = uploaded(graph, make_batch(1, LossName.CROSS_ENTROPY)), make_batch(2, LossName.PPO, (5, 9))
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
    refused, beside = trainer.run_pass([backward(RUN, batch), backward(NEIGHBOUR, neighbours)])
    assert isinstance(refused, InvalidRequest)
    assert "tensors of integers are not divided" in refused.message
    assert np.isfinite(output(beside).metrics["loss:sum"])


def test_floats_and_numbers_are_divided() -> None:
    graph = nodes(
        call("half", "operator.floordiv", {"ref": "n"}, 2),
        call("rest", "operator.mod", LOGP, {"ref": "half"}),
        call("whole", "torch.div", LOGP, 2, rounding_mode="trunc"),
        call("both", "operator.add", {"ref": "rest"}, {"ref": "whole"}),
        call("loss", "torch.sum", {"ref": "both"}),
    )
    graph["nodes"].insert(1, call("n", "numel", LOGP, op="call_method"))
    loss, logp = read_custom_loss(loss_id_of("divides", INPUTS, graph)), np.array([-3.5, -1.0, 2.5, 5.0], np.float32)
    found = evaluate(loss, [Datum(np.zeros(4, np.int64), np.zeros(4, np.int64), {})], [logp])
    assert found.loss == float((logp % 2 + np.trunc(logp / 2)).sum())


def test_a_custom_loss_has_the_same_bits_on_any_number_of_threads() -> None:
    """A replay on another machine, or beside other passes, has the gradient that was told."""
    loss = read_custom_loss(traced(sharpened, {"logprobs": 1}))
    length, before, found = 200_000, torch.get_num_threads(), []
    datum = Datum(np.zeros(length, np.int64), np.zeros(length, np.int64), {})
    logp = np.random.default_rng(1).normal(size=length).astype(np.float32)
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.append(evaluate(loss, [datum], [logp]))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len({one.loss for one in found}) == 1
    assert len({one.slopes[0].tobytes() for one in found}) == 1


def sharpened(logprobs: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    return (logprobs.exp().sum() * logprobs.sum()) / logprobs.std(), {}


@pytest.mark.parametrize(("told", "expected"), [("an operator's", InvalidRequest), (None, MemoryError)])
def test_a_lack_of_memory_is_no_fault_of_the_loss(
    monkeypatch: pytest.MonkeyPatch, told: str | None, expected: type[Exception]
) -> None:
    """torch's own error of its allocator, beside another of the same type."""
    with pytest.raises(RuntimeError) as lacking:
        torch.empty(2**60, dtype=torch.uint8)

    def fails(*_: object) -> None:
        raise RuntimeError(told) if told else lacking.value

    monkeypatch.setattr(custom_loss, "_FUNCTIONS", {**custom_loss._FUNCTIONS, "torch.sum": fails})
    loss = read_custom_loss(loss_id_of("fails", INPUTS, nodes(call("loss", "torch.sum", LOGP))))
    with pytest.raises(expected):
        evaluate(loss, [Datum(np.zeros(4, np.int64), np.zeros(4, np.int64), {})], [np.zeros(4, np.float32)])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["mean", "logprobs", "float32", "nan"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["ref", "tuple", "slice", "dict", "float", "dtype", "ellipsis"]), inner, max_size=2
        )
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
NODES = st.fixed_dictionaries(
    {
        "op": st.sampled_from(["call_function", "call_method", "output"]) | ANYTHING,
        "name": st.just("loss") | ANYTHING,
        "target": st.sampled_from(["torch.sum", "to", "getattr", "operator.getitem"]) | ANYTHING,
        "args": st.lists(ANYTHING, max_size=3) | ANYTHING,
        "kwargs": st.dictionaries(st.sampled_from(["dim", "dtype"]), ANYTHING, max_size=2) | ANYTHING,
    }
)


@example(call("loss", "torch.sum", {"float": []}), {"name": "logprobs", "rank": 1}, [])
@example(call("loss", "torch.sum", LOGP, dtype={"dtype": {}}), {"name": "logprobs", "rank": 1}, [])
@hypothesis_settings(max_examples=300)
@given(NODES, st.fixed_dictionaries({"name": ANYTHING, "rank": ANYTHING}), ANYTHING)
def test_any_json_is_a_loss_or_an_invalid_request(node: dict[str, Any], entry: dict[str, Any], result: Any) -> None:
    odd = nodes()
    odd["nodes"][-1]["args"] = result
    for inputs, graph in ((INPUTS, nodes(node)), ([entry], nodes(node)), (INPUTS, odd)):
        with suppress(InvalidRequest):
            loss_id_of("anything", inputs, graph)
