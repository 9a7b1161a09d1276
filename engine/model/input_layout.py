"""Finds the shape of each projection's input, and makes the rows of the batch its first dimension where possible.

Architectures give their projections one of three layouts:

- (rows, length, features): most architectures.
- (rows * length, features): the MLP of OPT and the shared expert of Qwen2-MoE. The rows can be restored.
- A choice of tokens: routed experts. The rows are lost, so these projections cannot carry adapters.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from contracts.errors import EngineFailure


class InputLayout(Enum):
    """Shape of a projection's input: (rows, length, features), (rows * length, features) or unknown."""

    ROWS = auto()
    FLATTENED = auto()
    UNKNOWN = auto()


@torch.no_grad()
def observe_layouts(model: nn.Module, names: Sequence[str], input_ids: Tensor) -> tuple[dict[str, InputLayout], Tensor]:
    """Run one forward of ``input_ids`` int64 (rows, length); return each projection's layout and logits (rows, length, V).

    ``rows`` and ``length`` must differ, or the layouts cannot be told apart.
    """
    rows, length = input_ids.shape
    layouts = dict.fromkeys(names, InputLayout.UNKNOWN)

    def note(name: str) -> Any:
        def look(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            shape = inputs[0].shape
            if len(shape) == 3 and tuple(shape[:2]) == (rows, length):
                layouts[name] = InputLayout.ROWS
            elif len(shape) == 2 and shape[0] == rows * length:
                layouts[name] = InputLayout.FLATTENED

        return look

    handles = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in names]
    try:
        logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return layouts, logits


def restore_rows(model: nn.Module, backbone: nn.Module, projections: Sequence[nn.Module]) -> None:
    """Make flattened ``projections``, and every hook on them, see (rows, length, features).

    The batch's shape is taken from the forward of ``model`` or ``backbone``: OPT's model reaches its layers without calling
    its backbone.
    """
    if not projections:
        return
    shape: ContextVar[tuple[int, int] | None] = ContextVar("rows and length of the batch", default=None)

    def note(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        batch = next(
            value for value in (*inputs, named.get("input_ids"), named.get("inputs_embeds")) if value is not None
        )
        shape.set((batch.shape[0], batch.shape[1]))

    for module in {model, backbone}:
        module.register_forward_pre_hook(note, with_kwargs=True)
    for projection in projections:
        # Hooks run within __call__, and Python looks __call__ up on the class: only a subclass can act before the hooks.
        projection.__class__ = _rowwise(type(projection), shape)


def _rowwise(kind: type[nn.Module], shape: ContextVar[tuple[int, int] | None]) -> type[nn.Module]:
    def call(self: nn.Module, inputs: Tensor) -> Tensor:
        batch = shape.get()
        if batch is None or inputs.dim() != 2 or inputs.shape[0] != batch[0] * batch[1]:
            raise EngineFailure("a projection of the base model was given tokens that no longer tell their rows")
        output: Tensor = kind.__call__(self, inputs.view(*batch, inputs.shape[-1]))
        return output.flatten(0, 1)

    return type(f"Rowwise{kind.__name__}", (kind,), {"__call__": call})
