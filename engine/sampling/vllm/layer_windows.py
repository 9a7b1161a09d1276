"""Layers of a base model whose attention reaches back over a window only, and the cells that vLLM keeps for each kind."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.model.class_defaults import class_layer_types

_SLIDING = "sliding_attention"
_HARDLY_MORE = 1.5
"""Ratio of two kinds of layers below which vLLM makes its groups as large as the larger kind."""


class CachedLayers(NamedTuple):
    """Numbers of layers for which vLLM keeps the whole context (``full``), and the last ``window`` tokens (``sliding``)."""

    full: int
    sliding: int = 0
    window: int = 0


def cached_layers(config: Mapping[str, Any], model: Path) -> CachedLayers:
    """Return the layers of the model in the folder ``model``, by its text model's ``config`` and else by its class.

    A window without a word about which layers have it counts for none: more memory is reckoned then than is needed.
    """
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return CachedLayers(layers)
    types = config.get("layer_types") or class_layer_types(model)
    if types:
        sliding = sum(kind == _SLIDING for kind in types[:layers])
    else:
        # Of each ``sliding_window_pattern`` layers the last one keeps the whole context.
        pattern = config.get("sliding_window_pattern") or 1
        sliding = layers - layers // pattern
    return _grouped(layers - sliding, sliding, window)


def _grouped(full: int, sliding: int, window: int) -> CachedLayers:
    """Return the numbers with the layers that vLLM adds: its groups of layers of one kind are equally large.

    As ``_get_kv_cache_groups_uniform_page_size`` in vLLM's ``v1/core/kv_cache_utils.py`` has it.
    """
    if not full or not sliding:
        return CachedLayers(full, sliding, window)
    size = min(full, sliding)
    if max(full, sliding) < size * _HARDLY_MORE:
        size = max(full, sliding)
    return CachedLayers(math.ceil(full / size) * size, math.ceil(sliding / size) * size, window)
