"""A base model as adapters' files need to know it: its layers by name and size, and none of its weights.

So a process that reads and writes adapters needs no base in its memory.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from contracts.operations import LoraSettings
from engine.model.lora import LoraLayout, Projection, layout_of


class AdapterBase(Protocol):
    """The base of an adapter's files: a ``BaseModel``, or its ``BaseOutline``."""

    @property
    def name(self) -> str:
        """The base's served name."""
        ...

    @property
    def device(self) -> torch.device:
        """Device that adapters are read onto."""
        ...

    @property
    def projections(self) -> Mapping[str, Projection]:
        """Layers that adapters may change, by name."""
        ...

    @property
    def linear_names(self) -> frozenset[str]:
        """Names of all linear layers."""
        ...

    @property
    def output_name(self) -> str | None:
        """Name of the output layer, None when adapters cannot change it."""
        ...

    @property
    def is_conv1d(self) -> bool:
        """True when projections store their weight transposed."""
        ...

    def layout(self, settings: LoraSettings) -> LoraLayout:
        """Return the layout of an adapter with these settings."""
        ...

    def is_own_head(self, weight: Tensor) -> bool:
        """Tell whether ``weight`` equals the output layer's own."""
        ...


@dataclass(frozen=True, slots=True)
class WeightDigest:
    """SHA-256 of a weight's bytes, with its data type and shape."""

    dtype: str
    shape: tuple[int, ...]
    sha256: bytes

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Return the digest of ``weight``."""
        raw = weight.detach().cpu().contiguous().view(torch.uint8).numpy()
        return cls(str(weight.dtype).removeprefix("torch."), tuple(weight.shape), hashlib.sha256(raw.data).digest())

    def fits(self, weight: Tensor) -> bool:
        """Tell whether ``weight`` is the same once it is rounded to the digest's data type."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return tuple(weight.shape) == self.shape and WeightDigest.of(weight.to(dtype)) == self


@dataclass(frozen=True, slots=True)
class ModelNames:
    """A model's layers by name, as a merge into its files needs to know them; ``conv1d``: those with transposed weights.

    ``stored``: names in the base's files of tensors that have another name in the model. ``converted``: layers whose weight is
    in no tensor of its own in the files. ``ties_head``: the head's weight is the embedding's.
    """

    stored: Mapping[str, str]
    converted: frozenset[str]
    head: str | None
    embedding: str | None
    ties_head: bool
    conv1d: frozenset[str]
    is_quantized: bool


@dataclass(frozen=True)
class BaseOutline:
    """``AdapterBase`` as plain data, for another process; ``all_projections`` are in the base's order."""

    name: str
    all_projections: tuple[Projection, ...]
    linear_names: frozenset[str]
    output_name: str | None
    is_conv1d: bool
    head: WeightDigest | None

    @property
    def device(self) -> torch.device:
        """See ``AdapterBase``: the CPU."""
        return torch.device("cpu")

    @cached_property
    def projections(self) -> Mapping[str, Projection]:
        """See ``AdapterBase``."""
        return {one.name: one for one in self.all_projections}

    def layout(self, settings: LoraSettings) -> LoraLayout:
        """See ``AdapterBase``."""
        return layout_of(settings, self.all_projections)

    def is_own_head(self, weight: Tensor) -> bool:
        """See ``AdapterBase``."""
        return self.head is not None and self.head.fits(weight)
