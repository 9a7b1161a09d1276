"""LoRA adapters, ``y = W x + (alpha / rank) B A x``: each adapter's matrices are views of one flat vector.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; initialisation as in PEFT. With one vector an adapter, a
step, a copy, a page-out or a stack of many adapters is one operation, not one for each matrix.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import torch
from torch import Tensor

from contracts.operations import LoraSettings

ProjectionGroup = Literal["attn", "mlp", "unembed"]


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layer of the base that adapters may change; ``name`` is its full module name."""

    name: str
    group: ProjectionGroup
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Matrices A and B of one projection: ``a`` (rank, in_features), ``b`` (out_features, rank).

    A leading dimension is that of several adapters.
    """

    a: Tensor
    b: Tensor


class LoraLayout:
    """Places of each projection's A and B in an adapter's vector: A before B, in the base's order of projections.

    Two adapters with equal ``key`` on one base have the same layout.
    """

    def __init__(self, rank: int, projections: Mapping[str, Projection]) -> None:
        self.rank = rank
        self.names = tuple(projections)
        self.key = (rank, self.names)
        self._shapes = {
            name: (projection.in_features, projection.out_features) for name, projection in projections.items()
        }
        self.sizes = [rank * features for shape in self._shapes.values() for features in shape]
        self.size = sum(self.sizes)
        """Number of elements of the vector."""
        self.head_names = frozenset(name for name, projection in projections.items() if projection.group == "unembed")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def head(self) -> slice:
        """Place of the output layer's A and B in the vector; empty without an adapter there."""
        at = 0
        for name, shape in self._shapes.items():
            size = self.rank * sum(shape)
            if name in self.head_names:
                return slice(at, at + size)
            at += size
        return slice(at, at)

    def pairs(self, vectors: Tensor) -> dict[str, LoraPair]:
        """Return views of ``vectors`` (size,) or (adapters, size), by projection name."""
        parts = iter(torch.split(vectors, self.sizes, dim=-1))
        leading = vectors.shape[:-1]
        return {
            name: LoraPair(
                next(parts).view(*leading, self.rank, in_features), next(parts).view(*leading, out_features, self.rank)
            )
            for name, (in_features, out_features) in self._shapes.items()
        }

    def shapes(self) -> dict[str, tuple[torch.Size, torch.Size]]:
        """Return the shapes of A and B by projection name."""
        return {
            name: (torch.Size((self.rank, in_features)), torch.Size((out_features, self.rank)))
            for name, (in_features, out_features) in self._shapes.items()
        }

    def vector(self, pairs: Mapping[str, LoraPair]) -> Tensor:
        """Return a new vector of the pairs' values, float32 (size,)."""
        return torch.cat([part.float().reshape(-1) for name in self.names for part in (pairs[name].a, pairs[name].b)])


def trains(settings: LoraSettings, group: ProjectionGroup) -> bool:
    """Tell whether ``settings`` put an adapter on the projections of ``group``."""
    return {"attn": settings.train_attn, "mlp": settings.train_mlp, "unembed": settings.train_unembed}[group]


def layout_of(settings: LoraSettings, projections: Iterable[Projection]) -> LoraLayout:
    """Return the layout of an adapter with these settings on a base with these projections."""
    return LoraLayout(settings.rank, {one.name: one for one in projections if trains(settings, one.group)})


@dataclass(frozen=True)
class LoraWeights:
    """One adapter's weights, ``vector`` float32 (layout.size,). A value: training makes a new one and changes none."""

    settings: LoraSettings
    layout: LoraLayout
    vector: Tensor

    @property
    def scaling(self) -> float:
        """Factor of the low-rank part, ``alpha / rank``."""
        return self.settings.alpha / self.settings.rank

    @cached_property
    def tensors(self) -> Mapping[str, LoraPair]:
        """Matrices by projection name, views of ``vector``."""
        return self.layout.pairs(self.vector)

    @classmethod
    def initialise(cls, settings: LoraSettings, layout: LoraLayout, device: torch.device) -> Self:
        """Make new weights: A Kaiming-uniform with slope sqrt(5), as in PEFT, and B zero.

        Kaiming-uniform: He et al. 2015, "Delving Deep into Rectifiers"; the slope makes its bound 1 / sqrt(in_features). Equal
        seed and layout give equal bits. Raises ``ValueError`` when the settings have no seed.
        """
        if settings.seed is None:
            raise ValueError("resolve the seed first")
        generator = torch.Generator().manual_seed(settings.seed % 2**63)
        vector = torch.zeros(layout.size)
        for pair in layout.pairs(vector).values():
            bound = 1 / math.sqrt(pair.a.shape[-1])
            pair.a.uniform_(-bound, bound, generator=generator)
        return cls(settings, layout, vector.to(device))


def bare_weights(device: torch.device) -> LoraWeights:
    """Return an adapter on no projection: the bare base."""
    return LoraWeights(LoraSettings(rank=1), LoraLayout(1, {}), torch.zeros(0, device=device))


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Rows ``[start, end)`` of a batch, which use ``adapter``."""

    adapter: LoraWeights
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class AdapterSegments:
    """Adapters on segments of a batch's rows, for forwards without gradients."""

    segments: tuple[AdapterSegment, ...]

    def add(self, name: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return ``output`` (rows, …, out) plus each segment's low-rank part of ``inputs`` (rows, …, in)."""
        rows = inputs.shape[0]
        active = [part for part in self.segments if name in part.adapter.tensors and part.start < part.end]
        if not active:
            return output
        if len(active) == 1 and active[0].start == 0 and active[0].end >= rows:
            return _plus_low_rank(output, inputs, name, active[0].adapter)
        parts, at = [], 0
        for segment in sorted(active, key=lambda segment: segment.start):
            if segment.start > at:
                parts.append(output[at : segment.start])
            rows_of = slice(segment.start, segment.end)
            parts.append(_plus_low_rank(output[rows_of], inputs[rows_of], name, segment.adapter))
            at = segment.end
        if at < rows:
            parts.append(output[at:])
        return torch.cat(parts)


def _plus_low_rank(output: Tensor, inputs: Tensor, name: str, adapter: LoraWeights) -> Tensor:
    """Compute the low-rank part in the adapter's float32 and add it in ``output``'s dtype."""
    pair = adapter.tensors[name]
    inner = inputs.reshape(-1, inputs.shape[-1]).to(pair.a.dtype) @ pair.a.t()
    if output.dtype == pair.b.dtype:
        flat = torch.addmm(output.reshape(-1, output.shape[-1]), inner, pair.b.t(), alpha=adapter.scaling)
        return flat.view(output.shape)
    low_rank = (inner @ pair.b.t()).mul_(adapter.scaling)
    return output + low_rank.to(output.dtype).view(output.shape)
