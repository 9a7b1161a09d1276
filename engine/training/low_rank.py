"""The low-rank products ``(alpha / rank) B A x`` of many adapters in one fused pass, forward and backward.

The formula is LoRA's: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".

- Adapters of one layout form a group. Their matrices are stacked: (adapters, rank, in) and (adapters, out, rank).
- A group's tokens are cut into blocks of one adapter each. Blocks of equal size are computed by batched products, blocks of
  different sizes by one product each.
- For each projection, one autograd function adds the low-rank part in place and returns each adapter's gradient.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from engine.model.lora import LoraLayout, LoraPair, LoraWeights

_LARGE_BLOCK = 256
"""Mean tokens of an adapter from which one product for each adapter is faster than gathering its matrices for every row."""


class Stopwatch:
    """Seconds spent inside ``measure`` blocks. On an accelerator: the time to launch the work, not to do it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the seconds spent in the ``with`` block."""
        started = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - started


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of a group: tokens ``[start, end)`` of all rows flattened, and their division among the group's adapters.

    - ``sizes``: tokens of each adapter, in the adapters' order.
    - ``owners``: int64 (blocks,), the adapter of each of several equal blocks; None when block i is adapter i's.
    - ``scaling``: (adapters, 1, 1), alpha / rank.

    With neither owners nor equal sizes, each adapter gets a product of its own.
    """

    start: int
    end: int
    sizes: tuple[int, ...]
    owners: Tensor | None
    scaling: Tensor

    @property
    def are_equal(self) -> bool:
        """True when all blocks have one size, so that batched products can compute them."""
        return self.owners is not None or len(set(self.sizes)) == 1

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over (adapter, start, end) of the adapters that have tokens."""
        at = self.start
        for adapter, size in enumerate(self.sizes):
            if size:
                yield adapter, at, at + size
            at += size


class StackedGroup:
    """Adapters of one layout, stacked in ``dtype``. With ``trains``, the ``leaves`` require gradients.

    - ``factors``: A and B of each projection, with which products are computed.
    - ``pairs``: leaves of each projection, to which gradients are added. They are the factors, save on the output layer.

    Leaves of the output layer are float32, with the factors' values. Each chunk of the output layer's positions adds to their
    gradients, and a sum of hundreds of terms loses the smaller ones in a narrow type.
    """

    def __init__(
        self, layout: LoraLayout, adapters: Sequence[LoraWeights], dtype: torch.dtype, *, trains: bool
    ) -> None:
        self.layout = layout
        vectors = [adapter.vector for adapter in adapters]
        stacked = (torch.stack(vectors) if len(vectors) > 1 else vectors[0][None]).to(dtype)
        factors = layout.pairs(stacked.detach())
        self.factors: Mapping[str, LoraPair] = factors
        wide = {
            name: LoraPair(factors[name].a.float(), factors[name].b.float()) for name in layout.head_names if trains
        }
        self.pairs: Mapping[str, LoraPair] = {**factors, **wide}
        if trains:
            for leaf in self.leaves():
                leaf.requires_grad_()
        scaling = torch.tensor([adapter.scaling for adapter in adapters], dtype=dtype, device=stacked.device)
        self.scaling = scaling.view(-1, 1, 1)

    def leaves(self) -> list[Tensor]:
        """Return A and B of every projection, in the layout's order."""
        return [leaf for pair in self.pairs.values() for leaf in (pair.a, pair.b)]

    def gradient(self, found: Sequence[Tensor | None]) -> Tensor:
        """Concatenate the leaves' gradients into one tensor, float32 (adapters, layout.size), zero where a leaf has none."""
        parts = [
            (torch.zeros_like(leaf) if part is None else part).flatten(1).float()
            for leaf, part in zip(self.leaves(), found, strict=True)
        ]
        return torch.cat(parts, dim=1)


class LowRankPlan:
    """Adapters of one micro-batch: groups and their blocks. ``BaseModel.adapters`` makes a plan active."""

    def __init__(self, groups: Sequence[StackedGroup], blocks: Sequence[_Blocks], stopwatch: Stopwatch) -> None:
        self._groups = groups
        self._blocks = blocks
        self._stopwatch = stopwatch

    @classmethod
    def of_rows(
        cls, groups: Sequence[StackedGroup], rows: Sequence[Sequence[int]], length: int, stopwatch: Stopwatch
    ) -> "LowRankPlan":
        """Plan for padded rows of ``length`` tokens: the first ``rows[0][0]`` are of adapter 0 of group 0, and so on in order."""
        blocks, at = [], 0
        for group, counts in zip(groups, rows, strict=True):
            end = at + sum(counts) * length
            owners = _owners(counts, length, group.scaling.device)
            blocks.append(_Blocks(at, end, tuple(count * length for count in counts), owners, group.scaling))
            at = end
        return cls(groups, blocks, stopwatch)

    @classmethod
    def of_tokens(
        cls, groups: Sequence[StackedGroup], tokens: Sequence[Sequence[int]], stopwatch: Stopwatch
    ) -> "LowRankPlan":
        """Plan for tokens without padding: the first ``tokens[0][0]`` are of adapter 0 of group 0, and so on in order."""
        blocks, at = [], 0
        for group, counts in zip(groups, tokens, strict=True):
            blocks.append(_Blocks(at, at + sum(counts), tuple(counts), None, group.scaling))
            at += sum(counts)
        return cls(groups, blocks, stopwatch)

    def adapts(self, name: str) -> bool:
        """Tell whether any adapter changes projection ``name``."""
        return any(name in group.pairs for group in self._groups)

    def cut(self, start: int, end: int) -> "LowRankPlan":
        """Return the part of a plan of tokens that covers tokens ``[start, end)``."""
        blocks = []
        for block in self._blocks:
            sizes = [0] * len(block.sizes)
            for adapter, first, last in block.spans():
                sizes[adapter] = max(0, min(last, end) - max(first, start))
            first = min(max(block.start, start), end) - start
            blocks.append(_Blocks(first, first + sum(sizes), tuple(sizes), None, block.scaling))
        return LowRankPlan(self._groups, blocks, self._stopwatch)

    def add(self, name: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Add the low-rank part of ``inputs`` (…, in) to ``output`` (…, out), in place where possible, and return the sum."""
        blocks: list[_Blocks] = []
        factors: list[LoraPair] = []
        leaves: list[Tensor] = []
        for group, block in zip(self._groups, self._blocks, strict=True):
            pair = group.pairs.get(name)
            if pair is not None and block.end > block.start:
                blocks.append(block)
                factors.append(group.factors[name])
                leaves += (pair.a, pair.b)
        if not blocks:
            return output
        if output._is_view():
            output = output.clone()
        given = (output, inputs, blocks, factors, self._stopwatch, *leaves)
        added: Tensor = _AddLowRank.apply(*given)  # type: ignore[no-untyped-call]
        return added


class _AddLowRank(torch.autograd.Function):
    """Low-rank part as one function: ``output[block] += scaling * (inputs[block] A^T) B^T`` for every block of every group.

    A and B are those of ``factors``; their gradients go to ``leaves``, in the leaves' type.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        inputs: Tensor,
        blocks: list[_Blocks],
        factors: list[LoraPair],
        stopwatch: Stopwatch,
        *leaves: Tensor,
    ) -> Tensor:
        with stopwatch.measure():
            x, y = inputs.reshape(-1, inputs.shape[-1]), output.view(-1, output.shape[-1])
            inner = [_add_group(x, y, block, pair) for block, pair in zip(blocks, factors, strict=True)]
            ctx.mark_dirty(output)
            ctx.save_for_backward(x, *(part for pair in factors for part in (pair.a, pair.b)), *inner)
            ctx.blocks, ctx.stopwatch, ctx.inputs_shape = blocks, stopwatch, inputs.shape
            ctx.summed_in = leaves[0].dtype
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        with ctx.stopwatch.measure():
            x, *saved = ctx.saved_tensors
            blocks: list[_Blocks] = ctx.blocks
            factors, inner = saved[: 2 * len(blocks)], saved[2 * len(blocks) :]
            dy = upstream[0].reshape(x.shape[0], -1)
            dx = None
            if ctx.needs_input_grad[1]:
                covered = sum(block.end - block.start for block in blocks) == x.shape[0]
                dx = torch.empty_like(x) if covered else torch.zeros_like(x)
            gradients: list[Tensor] = []
            for number, block in enumerate(blocks):
                pair = LoraPair(factors[2 * number], factors[2 * number + 1])
                gradients += _group_gradients(x, dy, dx, inner[number], block, pair, ctx.summed_in)
        return (upstream[0], None if dx is None else dx.view(ctx.inputs_shape), None, None, None, *gradients)


def _add_group(x: Tensor, y: Tensor, block: _Blocks, pair: LoraPair) -> Tensor:
    """Add one group's part to ``y`` (tokens, out) and return the scaled inner activations ``A x``.

    The activations' shape is (rank, group's tokens), or (blocks, rank, block's tokens). With the rank as rows every
    product is several times as fast as with the rank as columns: BLAS has no kernel for so few columns.
    """
    a, b = pair.a, pair.b
    if not block.are_equal:
        inner = x.new_empty(a.shape[1], block.end - block.start)
        for adapter, start, end in block.spans():
            part = inner[:, start - block.start : end - block.start]
            torch.mm(a[adapter].to(x.dtype), x[start:end].t(), out=part)
            part.mul_(block.scaling[adapter].to(x.dtype))
            y[start:end].addmm_(part.t(), b[adapter].to(x.dtype).t())
        return inner
    a, b, scaling = a.to(x.dtype), b.to(x.dtype), block.scaling.to(x.dtype)
    if block.owners is not None:
        a, b, scaling = a[block.owners], b[block.owners], scaling[block.owners]
    count = a.shape[0]
    inner = torch.bmm(a, x[block.start : block.end].view(count, -1, x.shape[1]).transpose(1, 2)).mul_(scaling)
    y[block.start : block.end].view(count, -1, y.shape[1]).baddbmm_(inner.transpose(1, 2), b.transpose(1, 2))
    return inner


def _group_gradients(
    x: Tensor, dy: Tensor, dx: Tensor | None, inner: Tensor, block: _Blocks, pair: LoraPair, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients, of ``dtype``, of one group's A and B; fill its part of ``dx`` (tokens, in) unless it is None."""
    if not block.are_equal:
        return _gradients_by_adapter(x, dy, dx, inner, block, pair, dtype)
    span = slice(block.start, block.end)
    a, b, scaling = pair.a.to(x.dtype), pair.b.to(x.dtype), block.scaling.to(x.dtype)
    if block.owners is not None:
        a, b, scaling = a[block.owners], b[block.owners], scaling[block.owners]
    count = a.shape[0]
    dy_blocks = dy[span].view(count, -1, dy.shape[1])
    d_inner = torch.bmm(b.transpose(1, 2), dy_blocks.transpose(1, 2)).mul_(scaling)
    db = torch.bmm(inner, dy_blocks).transpose(1, 2)
    da = torch.bmm(d_inner, x[span].view(count, -1, x.shape[1]))
    if dx is not None:
        torch.bmm(d_inner.transpose(1, 2), a, out=dx[span].view(count, -1, x.shape[1]))
    if block.owners is None:
        return da.to(dtype), db.to(dtype)
    return (
        torch.zeros_like(pair.a, dtype=dtype).index_add_(0, block.owners, da.to(dtype)),
        torch.zeros_like(pair.b, dtype=dtype).index_add_(0, block.owners, db.to(dtype)),
    )


def _gradients_by_adapter(
    x: Tensor, dy: Tensor, dx: Tensor | None, inner: Tensor, block: _Blocks, pair: LoraPair, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute ``_group_gradients`` with one product for each adapter."""
    a, b = pair.a, pair.b
    da, db = torch.zeros_like(a, dtype=dtype), torch.zeros_like(b, dtype=dtype)
    for adapter, start, end in block.spans():
        part = inner[:, start - block.start : end - block.start]
        d_inner = torch.mm(b[adapter].to(x.dtype).t(), dy[start:end].t())
        d_inner.mul_(block.scaling[adapter].to(x.dtype))
        db[adapter].copy_((part @ dy[start:end]).t())
        da[adapter].copy_(d_inner @ x[start:end])
        if dx is not None:
            torch.mm(d_inner.t(), a[adapter].to(x.dtype), out=dx[start:end])
    return da, db


def _owners(rows: Sequence[int], length: int, device: torch.device) -> Tensor | None:
    """Return the adapter of each of several equal blocks, int64 (blocks,).

    None where one batched product, or one product for each adapter, is cheaper than gathering matrices for every block.
    """
    if len(set(rows)) == 1 or sum(rows) * length >= _LARGE_BLOCK * len(rows):
        return None
    block_rows = reduce(math.gcd, rows)
    blocks = [adapter for adapter, count in enumerate(rows) for _ in range(count // block_rows)]
    return torch.tensor(blocks, device=device)
