"""Many LoRA adapters in one pair of matrix products, for decode steps: one token a row, and an adapter for each row.

The A matrices of all adapters are concatenated, and so are the B matrices (scaled by alpha / rank). One product with
each serves the whole batch, however many adapters share it. Between the two products a row's activations in the blocks
of other adapters are set to zero, so the result is the row's own ``B A x * alpha / rank`` (Hu et al. 2021).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.lora import LoraWeights

MAX_STACKED_RANK = 4096
"""Largest sum of ranks to stack. Beyond it the products with other adapters' blocks cost more than a pass per adapter."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """Stacked matrices of one projection, ``a`` (R, in) and ``b`` (out, R). ``owner_of_column`` (R) holds adapters' ids."""

    a: Tensor
    b: Tensor
    owner_of_column: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Stacks of a batch, and the columns that are not of a row's own adapter: bool (rows, 1, R), by projection name."""

    stacks: Mapping[str, _Stack]
    foreign: Mapping[str, Tensor]

    def add(self, name: str, inputs: Tensor, output: Tensor) -> Tensor | None:
        """Return ``output`` (rows, 1, out) plus the low-rank part of ``inputs`` (rows, 1, in); None without a stack."""
        stack = self.stacks.get(name)
        if stack is None:
            return None
        inner = nn.functional.linear(inputs.to(stack.a.dtype), stack.a)
        # Filled, not multiplied: another adapter's activations may be infinite, and 0 * inf would reach this row.
        inner = inner.masked_fill(self.foreign[name], 0.0)
        return output + nn.functional.linear(inner, stack.b).to(output.dtype)


class AdapterStack:
    """Adapters stacked once for all batches that they cover. Their tensors must be finite."""

    def __init__(self, adapters: Sequence[LoraWeights]) -> None:
        self._held = frozenset(map(id, adapters))
        self._adapters = tuple(adapters)
        self._stacks = {name: self._stack(name) for name in dict.fromkeys(n for a in adapters for n in a.tensors)}

    def __len__(self) -> int:
        return len(self._adapters)

    def covers(self, adapters: Sequence[LoraWeights | None]) -> bool:
        """Tell whether all ``adapters`` are in the stack; None, the bare base, always is."""
        return all(adapter is None or id(adapter) in self._held for adapter in adapters)

    def on(self, rows: Sequence[LoraWeights | None], device: torch.device) -> RowAdapters:
        """Return the adapters of a batch whose row i uses ``rows[i]``; None is the bare base."""
        made: dict[tuple[int, ...], Tensor] = {}  # by the owner of each column; most projections agree
        foreign = {}
        for name, stack in self._stacks.items():
            columns = stack.owner_of_column
            if columns not in made:
                owned = torch.tensor([id(row) for row in rows])[:, None] == torch.tensor(columns)[None]
                made[columns] = ~owned.to(device)[:, None]
            foreign[name] = made[columns]
        return RowAdapters(self._stacks, foreign)

    def _stack(self, name: str) -> _Stack:
        owners = tuple(adapter for adapter in self._adapters if name in adapter.tensors)
        a = torch.cat([owner.tensors[name].a for owner in owners])
        b = torch.cat([owner.tensors[name].b * owner.scaling for owner in owners], dim=1)
        return _Stack(a, b, tuple(id(owner) for owner in owners for _ in range(owner.tensors[name].a.shape[0])))


class StackHooks:
    """Forward hooks that add ``RowAdapters`` to a model's projections, in the calling thread only."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._active: ContextVar[RowAdapters | None] = ContextVar("row adapters", default=None)
        self._handles = [model.get_submodule(name).register_forward_hook(self._hook(name)) for name in names]

    @contextmanager
    def active(self, adapters: RowAdapters) -> Iterator[None]:
        """Add the low-rank parts of ``adapters`` to every forward pass inside the context."""
        token = self._active.set(adapters)
        try:
            yield
        finally:
            self._active.reset(token)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            adapters = self._active.get()
            return adapters.add(name, inputs[0], output) if adapters is not None else None

        return add
