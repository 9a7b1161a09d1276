"""Custom losses traced by the SDK, against PEFT and torch autograd, and hostile graphs. fp32, CPU.

Tolerances: 1e-5 relative to the largest value of the tensor compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from torch import Tensor
from torch.nn import functional

from contracts.custom_loss import MAX_GRAPH_BYTES, MAX_NODES, loss_id_of, read_custom_loss
from contracts.errors import InvalidRequest
from contracts.losses import LossName
from contracts.operations import Datum, ForwardBackwardOutput, LossSpec, TrainingBatch
from engine.training.custom_loss import evaluate
from engine.training.trainer import PassItem, Trainer
from tests.custom_losses import INPUTS, LOGP, call, nodes
from tests.engine.training.conftest import (
    NEIGHBOUR,
    RUN,
    backward,
    gradients_of,
    make_batch,
    randomise,
    reference_for,
    settings,
)

SOON = 30.0
"""Seconds within which a hostile graph is refused, on a busy machine."""
Loss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


def dpo(logprobs: Tensor, reference: Tensor, sign: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    margin = (logprobs - reference).sum() * sign
    return -functional.logsigmoid(0.1 * margin), {
        "custom/margin:mean": margin,
        "custom/right:sum": (margin > 0).float(),
    }


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    ratio = torch.exp(logprobs - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    entropy = torch.where(mask > 0, logprobs.exp() * logprobs, torch.zeros_like(logprobs)).sum()
    kept = logprobs[1:] - logprobs[:-1]
    loss = -(surrogate * mask).sum() / mask.sum() + 0.01 * entropy + 1e-3 * (kept**2).mean() / logprobs.shape[0]
    return loss, {"custom/ratio:mean": ratio.mean()}


def distilled(logprobs: Tensor, teacher: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    student = logprobs - torch.logsumexp(logprobs, dim=-1, keepdim=True)
    loss = (teacher.softmax(-1) * (teacher.log_softmax(-1) - student)).sum(-1)
    best = logprobs.max(dim=-1).values
    return loss.mean() + 0.1 * functional.softplus(best).std(), {"custom/kl:sum": loss.sum()}


def ranked(logprobs: Tensor, gain: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    pairs = (gain[:, None] > gain[None, :]).float()
    difference = logprobs.unsqueeze(1) - logprobs.unsqueeze(0).expand(-1, logprobs.shape[0])
    loss = -(functional.logsigmoid(difference) * pairs).sum() / count_of(pairs)
    return loss, {}


def borrowed(logprobs: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Torch's own losses, by all ways of reducing them."""
    kl = functional.kl_div(logprobs, other.log_softmax(0), reduction="batchmean", log_target=True)
    kl = kl + functional.kl_div(logprobs, functional.softmax(other, dim=-1), reduction="sum")
    right = functional.binary_cross_entropy_with_logits(
        logprobs - other, other.sigmoid(), weight=weight.abs(), pos_weight=weight.exp(), reduction="sum"
    )
    right = right + functional.binary_cross_entropy_with_logits(logprobs, other.sigmoid())
    near = functional.mse_loss(logprobs, other) + functional.l1_loss(logprobs, other, reduction="sum")
    near = near + functional.smooth_l1_loss(logprobs, other, beta=0.5)
    bent = functional.relu(logprobs + 5.7) + functional.silu(logprobs) + functional.elu(logprobs, alpha=0.3)
    bent = bent + functional.leaky_relu(logprobs + 5.7) * functional.log_softmax(logprobs, dim=-1)
    return kl + right + near + bent.mean(), {"custom/right:mean": right, "custom/kl:sum": kl}


def multiplied(logprobs: Tensor, survival: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Products over a sequence; the relu makes zeros, whose gradients take another way."""
    kept = torch.cumprod(survival.sigmoid(), dim=0)
    reached = functional.relu(logprobs + 5.7).cumprod(-1)
    whole = (1 + 0.1 * logprobs).prod() + torch.prod(functional.relu(logprobs + 5.7), dim=0)
    return -(kept * logprobs).sum() + reached.mean() + whole, {"custom/reached:sum": reached[-1]}


def count_of(pairs: Tensor) -> Tensor:
    return pairs.sum().clamp(min=1.0)


LOSSES: dict[Loss, dict[str, int]] = {
    dpo: {"logprobs": 1, "reference": 1, "sign": 0},
    clipped: {"logprobs": 1, "old": 1, "advantages": 1, "mask": 1},
    distilled: {"logprobs": 2, "teacher": 2},
    ranked: {"logprobs": 1, "gain": 1},
    borrowed: {"logprobs": 1, "other": 1, "weight": 1},
    multiplied: {"logprobs": 1, "survival": 1},
}


def traced(loss: Loss, ranks: dict[str, int]) -> str:
    """The id of a loss as the SDK uploads it."""
    handle = trace_loss(loss, ranks, "session")  # type: ignore[arg-type]
    graph = encode_graph(handle).model_dump()
    return loss_id_of(handle.name, [{"name": one.name, "rank": one.rank} for one in handle.inputs], graph)


def batch_of(loss: Loss, seed: int = 1) -> TrainingBatch:
    """Random data for the loss."""
    ranks, rng = LOSSES[loss], np.random.default_rng(seed)
    width = 3 if ranks["logprobs"] == 2 else None
    plain = make_batch(seed, LossName.CROSS_ENTROPY, width=width)
    data = []
    for datum in plain.data:
        shapes = {0: (), 1: datum.targets.shape[:1], 2: datum.targets.shape}
        inputs = {name: np.asarray(rng.normal(size=shapes[rank]), np.float32) for name, rank in list(ranks.items())[1:]}
        if "mask" in inputs:
            inputs["mask"] = (np.arange(len(datum.tokens)) > 0).astype(np.int64)
        data.append(replace(datum, inputs=inputs))
    return TrainingBatch(LossSpec(LossName.CUSTOM, loss_id=traced(loss, ranks)), data)


def output(outcome: object) -> ForwardBackwardOutput:
    assert isinstance(outcome, ForwardBackwardOutput), outcome
    return outcome


@pytest.fixture
def pair(trainer: Trainer) -> Trainer:
    """Two tenants' adapters with the head."""
    for run, seed, rank in ((RUN, 1, 8), (NEIGHBOUR, 2, 3)):
        trainer.create(run, settings(rank=rank, seed=seed))
        randomise(trainer, run, seed)
    return trainer


@pytest.mark.parametrize("loss", LOSSES)
def test_a_custom_loss_equals_autograd_through_peft(pair: Trainer, tiny_model_dir: Path, loss: Loss) -> None:
    """Beside a neighbour, whose numbers stay those it has alone."""
    batch, neighbours = batch_of(loss), make_batch(2, LossName.PPO, (5, 9))
    alone = output(pair.run_pass([PassItem(NEIGHBOUR, neighbours, False)])[0])
    result, beside = (output(one) for one in pair.run_pass([backward(RUN, batch), backward(NEIGHBOUR, neighbours)]))

    reference = reference_for(pair, RUN, tiny_model_dir)
    total, metrics = torch.zeros(()), list[Mapping[str, Tensor]]()
    for datum, logprobs in zip(batch.data, result.logprobs, strict=True):
        inputs = [torch.from_numpy(datum.inputs[name]) for name in list(LOSSES[loss])[1:]]
        logp = reference.logprobs(datum)
        value, told = loss(logp, *inputs)
        total, metrics = total + value, [*metrics, told]
        np.testing.assert_allclose(logprobs, logp.detach().numpy(), atol=1e-5, rtol=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    for name in metrics[0]:
        values = [float(one[name].detach()) for one in metrics]
        expected = sum(values) / (len(values) if name.endswith(":mean") else 1)
        assert result.metrics[name] == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(gradients_of(pair, RUN), torch.autograd.grad(total, reference.parameters), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * max(float(theirs.abs().max()), 1e-3)
    assert beside.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=1e-6)
    for mine, other in zip(beside.logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


def test_a_forward_tells_the_loss_and_adds_no_gradient(pair: Trainer) -> None:
    batch = batch_of(clipped)
    told = output(pair.run_pass([PassItem(RUN, batch, False)])[0])
    assert pair.state(RUN).gradient is None
    again = output(pair.run_pass([backward(RUN, batch)])[0])
    assert told.metrics == again.metrics


def uploaded(graph: dict[str, Any], like: TrainingBatch) -> TrainingBatch:
    """The batch with the loss of a graph on ``logprobs`` alone."""
    loss_id = loss_id_of("handmade", INPUTS, graph)
    return TrainingBatch(LossSpec(LossName.CUSTOM, loss_id=loss_id), [replace(one, inputs={}) for one in like.data])


DEEP: list[Any] = [1]
for _ in range(50):
    DEEP = [DEEP]
FORBIDDEN: dict[str, dict[str, Any]] = {
    "reads a file": nodes(call("loss", "torch.load", "/etc/passwd")),
    "imports": nodes(call("loss", "builtins.__import__", "os")),
    "a builtin": nodes(call("loss", "eval", "1")),
    "an attribute": nodes(call("loss", "getattr", LOGP, "__class__")),
    "an attribute that is no text": nodes(call("loss", "getattr", LOGP, ["shape"])),
    "a private method": nodes(call("loss", "__reduce_ex__", LOGP, 2, op="call_method")),
    "in place": nodes(call("loss", "zero_", LOGP, op="call_method")),
    "backward": nodes(call("loss", "backward", LOGP, op="call_method")),
    "a module": nodes(call("loss", "linear", LOGP, op="call_module")),
    "a captured tensor": nodes(call("loss", "weights", op="get_attr")),
    "an output tensor": nodes(call("loss", "torch.exp", LOGP, out=LOGP)),
    "a device": nodes(call("loss", "to", LOGP, {"device": "cuda"}, op="call_method")),
    "a device by text": nodes(call("loss", "to", LOGP, "cuda", op="call_method")),
    "in place by a function": nodes(call("loss", "torch.nn.functional.relu", LOGP, inplace=True)),
    "a way of reducing that is no more": nodes(call("loss", "torch.nn.functional.mse_loss", LOGP, LOGP, reduce=False)),
    "a nuclear norm": nodes(call("loss", "torch.norm", LOGP, "nuc")),
    "a node after it": nodes(call("loss", "torch.exp", {"ref": "later"}), call("later", "torch.sum", LOGP)),
    "itself": nodes(call("loss", "torch.exp", {"ref": "loss"})),
    "two of a name": nodes(call("loss", "torch.sum", LOGP), call("loss", "torch.sum", LOGP)),
    "no such result": nodes(call("loss", "torch.sum", LOGP), result="gone"),
    "too deep": nodes(call("loss", "torch.sum", DEEP)),
    "a huge number": nodes(call("loss", "operator.mul", LOGP, 10**30)),
    "too many nodes": nodes(*(call(f"n{number}", "torch.exp", LOGP) for number in range(MAX_NODES))),
    "too many arguments": nodes(call("loss", "torch.cat", [LOGP] * 100)),
    "two outputs": {"format": 1, "nodes": nodes()["nodes"] + nodes()["nodes"]},
    "too large": nodes(call("loss", "torch.sum", LOGP)) | {"more": "x" * MAX_GRAPH_BYTES},
    "no nodes": {"format": 1, "nodes": []},
    "another format": {"format": 2, "nodes": []},
    "nodes of text": {"format": 1, "nodes": ["exp"]},
}


@pytest.mark.parametrize("graph", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_graph_that_may_not_run_is_refused(graph: dict[str, Any]) -> None:
    began = perf_counter()
    with pytest.raises(InvalidRequest):
        loss_id_of("hostile", INPUTS, graph)
    assert perf_counter() - began < SOON


def doubling(times: int) -> list[dict[str, Any]]:
    """Nodes that double a vector again and again."""
    names = ["logprobs", *(f"n{number}" for number in range(times))]
    return [call(new, "torch.cat", [{"ref": old}, {"ref": old}]) for old, new in pairwise(names)]


def chain(target: str, times: int, *more: Any) -> list[dict[str, Any]]:
    names = ["logprobs", *(f"n{number}" for number in range(times - 1)), "loss"]
    return [call(new, target, {"ref": old}, *more) for old, new in pairwise(names)]


def picking(times: int) -> list[dict[str, Any]]:
    """Nodes that make sixty rows of one row, again and again."""
    found = []
    for place in range(times):
        before = {"ref": f"picked{place - 1}"} if place else LOGP
        found.append(call(f"row{place}", "reshape", before, 1, -1, op="call_method"))
        found.append(call(f"picked{place}", "operator.getitem", {"ref": f"row{place}"}, [0] * 60))
    return found


def sized(*middle: Mapping[str, Any]) -> dict[str, Any]:
    """A graph in which ``end`` is a tensor with a large number, and ``wide`` becomes the loss."""
    return nodes(
        call("sum", "torch.sum", LOGP),
        call("one", "operator.eq", {"ref": "sum"}, {"ref": "sum"}),
        call("big", "operator.mul", {"ref": "one"}, SIZE),
        call("end", "long", {"ref": "big"}, op="call_method"),
        *middle,
        call("copy", "clone", {"ref": "wide"}, op="call_method"),
        call("loss", "torch.sum", {"ref": "copy"}),
    )


SIZE = 2**31
COSTLY: dict[str, dict[str, Any]] = {
    "doubles": nodes(*doubling(40), call("loss", "torch.sum", {"ref": "n39"})),
    "expands": nodes(
        call("wide", "expand", LOGP, SIZE, -1, op="call_method"), call("loss", "torch.sum", {"ref": "wide"})
    ),
    "repeats": nodes(call("wide", "repeat", LOGP, SIZE, op="call_method"), call("loss", "torch.sum", {"ref": "wide"})),
    "ranges": nodes(call("wide", "torch.arange", SIZE), call("loss", "torch.sum", {"ref": "wide"})),
    "ranges by a tensor": sized(call("wide", "torch.arange", {"ref": "end"})),
    "expands by a tensor": sized(call("wide", "expand", LOGP, {"ref": "end"}, -1, op="call_method")),
    "expands by one tensor": sized(
        call("flat", "unsqueeze", {"ref": "sum"}, 0, op="call_method"),
        call("wide", "expand", {"ref": "flat"}, {"ref": "end"}, op="call_method"),
    ),
    "repeats by a tensor": sized(call("wide", "repeat", LOGP, {"ref": "end"}, op="call_method")),
    "picks the same again and again": nodes(*picking(6), call("loss", "torch.sum", {"ref": "picked5"})),
    "ranges by floats": nodes(
        call("wide", "torch.arange", {"float": "inf"}), call("loss", "torch.sum", {"ref": "wide"})
    ),
    "outer products": nodes(
        call("a", "torch.outer", LOGP, LOGP),
        call("b", "torch.flatten", {"ref": "a"}),
        call("c", "torch.outer", {"ref": "b"}, {"ref": "b"}),
        call("loss", "torch.sum", {"ref": "c"}),
    ),
    "broadcasts": nodes(
        call("a", "unsqueeze", LOGP, 1, op="call_method"),
        call("b", "operator.mul", {"ref": "a"}, LOGP),
        call("c", "reshape", {"ref": "b"}, -1, 1, op="call_method"),
        call("d", "reshape", {"ref": "b"}, 1, -1, op="call_method"),
        call("e", "torch.max", {"ref": "c"}, {"ref": "d"}),
        call("loss", "torch.sum", {"ref": "e"}),
    ),
    "broadcasts in a loss": nodes(
        call("a", "torch.outer", LOGP, LOGP),
        call("b", "reshape", {"ref": "a"}, -1, 1, op="call_method"),
        call("c", "reshape", {"ref": "a"}, 1, -1, op="call_method"),
        call("loss", "torch.nn.functional.kl_div", {"ref": "b"}, {"ref": "c"}, reduction="sum"),
    ),
    "broadcasts by a weight": nodes(
        call("a", "torch.outer", LOGP, LOGP),
        call("b", "reshape", {"ref": "a"}, -1, 1, op="call_method"),
        call("c", "reshape", {"ref": "a"}, 1, -1, op="call_method"),
        call(
            "loss",
            "torch.nn.functional.binary_cross_entropy_with_logits",
            {"ref": "b"},
            {"ref": "b"},
            pos_weight={"ref": "c"},
        ),
    ),
    "a tower of powers": nodes(
        call("n0", "numel", LOGP, op="call_method"),
        *(call(f"n{place}", "operator.pow", {"ref": f"n{place - 1}"}, {"ref": "n0"}) for place in range(1, 60)),
        call("loss", "torch.sum", LOGP),
    ),
    "large integers": nodes(
        call("n0", "numel", LOGP, op="call_method"),
        *(
            call(f"n{place}", "operator.mul", {"ref": f"n{place - 1}"}, {"ref": f"n{place - 1}"})
            for place in range(1, 60)
        ),
        call("loss", "torch.sum", LOGP),
    ),
    "tuples times a number": nodes(
        call("s", "getattr", LOGP, "shape"),
        call("t", "operator.mul", {"ref": "s"}, SIZE),
        call("loss", "torch.sum", LOGP),
    ),
    "no scalar": nodes(call("loss", "torch.exp", LOGP)),
    "an integer": nodes(call("loss", "numel", LOGP, op="call_method")),
    "shapes that do not fit": nodes(call("loss", "torch.matmul", LOGP, [1, 2])),
    "not finite": nodes(
        call("a", "torch.exp", LOGP),
        call("b", "torch.log", {"ref": "a"}),
        call("c", "torch.sqrt", {"ref": "b"}),
        call("loss", "torch.sum", {"ref": "c"}),
    ),
}


@pytest.mark.parametrize("graph", COSTLY.values(), ids=COSTLY)
def test_a_graph_that_costs_too_much_or_fails_fails_alone(pair: Trainer, graph: dict[str, Any]) -> None:
    """The graph is refused before its memory is taken, and a neighbour in the same passes has its own numbers."""
    loss_id = loss_id_of("hostile", INPUTS, graph)
    rng = np.random.default_rng(1)
    data = [Datum(rng.integers(0, 300, 200), rng.integers(0, 300, 200), {})]
    hostile = TrainingBatch(LossSpec(LossName.CUSTOM, loss_id=loss_id), data)
    neighbours = make_batch(2, LossName.PPO, (5, 9))
    began = perf_counter()
    refused, beside = pair.run_pass([backward(RUN, hostile), backward(NEIGHBOUR, neighbours)])
    assert perf_counter() - began < SOON
    assert isinstance(refused, InvalidRequest)
    assert pair.state(RUN).gradient is None
    alone = output(pair.run_pass([PassItem(NEIGHBOUR, neighbours, False)])[0])
    assert output(beside).metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=1e-6)


def test_the_work_of_many_data_is_bounded() -> None:
    """The amount of work is bounded and no clock: a replay does what was done before."""
    graph = nodes(*chain("torch.neg", 499), call("sum", "torch.sum", {"ref": "loss"}), result="sum")
    loss = read_custom_loss(loss_id_of("long", INPUTS, graph))
    datum = Datum(np.zeros(4, np.int64), np.zeros(4, np.int64), {})
    began = perf_counter()
    with pytest.raises(InvalidRequest, match="too much work for one request"):
        evaluate(loss, [datum] * 1024, [np.zeros(4, np.float32)] * 1024)
    assert perf_counter() - began < 60


@pytest.mark.parametrize("loss_id", ["", "weft-loss-1.", "weft-loss-1.AAAA", "../../etc", "weft-loss-1." + "A" * 40000])
def test_another_text_is_no_loss(loss_id: str) -> None:
    with pytest.raises(InvalidRequest, match="no id of a custom loss"):
        read_custom_loss(loss_id)
