"""The low-rank products of many adapters: what a chunk of positions costs is a matter of the adapters that have tokens in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from contracts.operations import LoraSettings
from engine.model.base import BaseModel
from engine.training.low_rank import LowRankPlan, StackedGroup, Stopwatch
from engine.training.trainer import fresh_state
from tests.engine.training.test_other_bases import load_base

VOCABULARY = 320


class Copies(TorchDispatchMode):
    """Counts the elements that are copied or cast."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.clone):
            self.elements += found.numel()
        return found


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> BaseModel:
    """The tiny base in bfloat16."""
    return load_base(tiny_model_dir, dtype="bfloat16", vocabulary=VOCABULARY)


def chunk(base: BaseModel, tokens: list[int], end: int) -> tuple[int, list[Tensor]]:
    """Compute the output layer's part of the positions before ``end``.

    ``tokens`` are those of each adapter. Return the elements copied, and the gradients of A and B.
    """
    settings = [LoraSettings(rank=4, seed=number, train_unembed=True) for number in range(len(tokens))]
    weights = [fresh_state(base, one).weights for one in settings]
    for number, one in enumerate(weights):
        one.vector.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    group = StackedGroup(weights[0].layout, weights, base.dtype, trains=True)
    (name,) = weights[0].layout.head_names
    plan = LowRankPlan.of_tokens([group], [tokens], Stopwatch()).cut(0, end)
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(end, group.pairs[name].a.shape[2], generator=draw).to(base.dtype)
    leaves = [group.pairs[name].a, group.pairs[name].b]
    with Copies() as copies:
        output = plan.add(name, inputs, torch.zeros(end, VOCABULARY, dtype=base.dtype))
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    return copies.elements, list(gradients)


def test_a_chunk_copies_nothing_of_adapters_without_tokens_in_it(base: BaseModel) -> None:
    """Seven neighbours' tokens come behind the chunk. The gradients are those of the two adapters alone."""
    alone, ours = chunk(base, [3, 2], 5)
    beside, all_ = chunk(base, [3, 2, *[4] * 6], 5)
    assert beside == alone
    for few, many in zip(ours, all_, strict=True):
        assert torch.equal(many[:2], few)
        assert not many[2:].any()


@pytest.mark.parametrize("tokens", [[3, 2], [4, 4]])
def test_the_products_copy_no_matrices_of_the_output_layer_forward(base: BaseModel, tokens: list[int]) -> None:
    """Blocks of different sizes, and of one size. What is copied are gradients, and the loss's own numbers."""
    end = sum(tokens)
    elements, gradients = chunk(base, tokens, end)
    of_loss = 2 * end * VOCABULARY
    assert elements <= of_loss + sum(gradient.numel() for gradient in gradients) + 8
