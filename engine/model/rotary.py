"""Positions that are the same for every sequence: LongRoPE and dynamic NTK choose frequencies once, not by a call's longest row.

transformers chooses them in each call by the largest position in it, and keeps them in the model: a neighbour's length would
change a sequence's numbers. The choice here is vLLM's: by the longest sequence that is served.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_LONGROPE, _DYNAMIC, _FIXED = "longrope", "dynamic", "default"
_ORIGINAL = "original_max_position_embeddings"
_PAIRS = ("factor", "mscale")
"""Ends of LongRoPE's settings that come in two: one up to the original length, one beyond it."""


def freeze_rotary(model: nn.Module, context_length: int) -> None:
    """Have the model's rotary embeddings use one table of frequencies, that for sequences of up to ``context_length``.

    LongRoPE: the long factors for a context beyond the original one, else the short factors. Dynamic NTK: those that the
    model was trained with, which transformers uses up to the model's own context.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            _freeze(module, kinds, None, context_length)
            if _is_moving(kinds):
                module.rope_type = _FIXED  # type: ignore[assignment]
        elif isinstance(kinds, Mapping):
            for layer_type, kind in kinds.items():
                _freeze(module, kind, layer_type, context_length)
            module.rope_type = {layer: _FIXED if _is_moving(kind) else kind for layer, kind in kinds.items()}  # type: ignore[assignment]


def _is_moving(kind: str) -> bool:
    """Tell whether transformers chooses frequencies of this kind in each call."""
    return kind == _LONGROPE or _DYNAMIC in kind


def _freeze(module: Any, kind: str, layer_type: str | None, context_length: int) -> None:
    """Write the frequencies of one layer type, None for all of them, into the module's table."""
    if not _is_moving(kind):
        return
    prefix = "" if layer_type is None else f"{layer_type}_"
    table = getattr(module, f"{prefix}inv_freq")
    if kind != _LONGROPE:
        table.copy_(getattr(module, f"{prefix}original_inv_freq").to(table))
        return
    # Some models compute the table again in each call: from settings in which both factors are the chosen ones.
    module.config = deepcopy(module.config)
    rope = module.config.rope_parameters
    _choose(rope if layer_type is None else rope[layer_type], context_length)
    named = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, table.device, **named)
    table.copy_(frequencies.to(table))
    setattr(module, f"{prefix}attention_scaling", scaling)


def _choose(rope: dict[str, Any], context_length: int) -> None:
    """Set both of each of LongRoPE's pairs to the one for ``context_length``."""
    chosen = "long" if context_length > rope[_ORIGINAL] else "short"
    for pair in _PAIRS:
        if f"{chosen}_{pair}" in rope:
            rope[f"short_{pair}"] = rope[f"long_{pair}"] = rope[f"{chosen}_{pair}"]
