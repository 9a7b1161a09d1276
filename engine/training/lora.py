"""LoRA tensors and where they apply: ``y = W x + (alpha / rank) B A x`` on segments of a batch's rows.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; initialisation as in PEFT.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor

from engine.contracts.operations import LoraSettings

if TYPE_CHECKING:
    from engine.training.base import BaseModel

ProjectionGroup = Literal["attn", "mlp", "unembed"]


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of the base that adapters may change; ``name`` is its full module name."""

    name: str
    group: ProjectionGroup
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class LoraPair:
    """``a`` float32 (rank, in_features), ``b`` float32 (out_features, rank)."""

    a: Tensor
    b: Tensor


def trains(settings: LoraSettings, group: ProjectionGroup) -> bool:
    """Whether ``settings`` put an adapter on that group."""
    return {"attn": settings.train_attn, "mlp": settings.train_mlp, "unembed": settings.train_unembed}[group]


class LoraWeights:
    """One adapter's tensors by projection name."""

    def __init__(self, settings: LoraSettings, tensors: Mapping[str, LoraPair]) -> None:
        self.settings = settings
        self.tensors = dict(tensors)

    @property
    def scaling(self) -> float:
        """``alpha / rank``."""
        return self.settings.alpha / self.settings.rank

    @classmethod
    def initialise(cls, base: "BaseModel", settings: LoraSettings) -> Self:
        """A is Kaiming-uniform with slope sqrt(5), B zero. Same seed and base: the same bits, whatever else runs."""
        if settings.seed is None:
            raise ValueError("resolve the seed first")
        generator = torch.Generator().manual_seed(settings.seed % 2**63)
        tensors = {}
        for name, projection in base.projections.items():
            if not trains(settings, projection.group):
                continue
            bound = 1 / math.sqrt(projection.in_features)
            a = torch.empty(settings.rank, projection.in_features).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(projection.out_features, settings.rank)
            tensors[name] = LoraPair(a.to(base.device), b.to(base.device))
        return cls(settings, tensors)

    def flat(self) -> list[Tensor]:
        """Every tensor, A before B, in the base's order of projections."""
        return [tensor for pair in self.tensors.values() for tensor in (pair.a, pair.b)]


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Rows ``[start, end)`` of the batch use ``adapter``."""

    adapter: LoraWeights
    start: int
    end: int


def add_low_rank(output: Tensor, inputs: Tensor, name: str, segments: tuple[AdapterSegment, ...]) -> Tensor:
    """``output`` (rows, …, out) plus each segment's low-rank part of ``inputs`` (rows, …, in)."""
    rows = inputs.shape[0]
    active = [segment for segment in segments if name in segment.adapter.tensors and segment.start < segment.end]
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
    """The low-rank part in float32, added in ``output``'s dtype."""
    pair = adapter.tensors[name]
    inner = inputs.reshape(-1, inputs.shape[-1]).to(pair.a.dtype) @ pair.a.t()
    if output.dtype == pair.b.dtype:
        flat = torch.addmm(output.reshape(-1, output.shape[-1]), inner, pair.b.t(), alpha=adapter.scaling)
        return flat.view(output.shape)
    return output + (inner @ pair.b.t() * adapter.scaling).to(output.dtype).view(output.shape)
