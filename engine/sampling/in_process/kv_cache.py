"""KV cache of a batch that sequences join and leave: each sequence is a row, each token position a column.

Rows are right-aligned: a row shorter than the batch has padding on its left, which the attention mask hides. Every
layer keeps all columns, even a sliding-window layer, whose mask does the windowing. So any rows can share a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_MIN_SLACK = 64


class SlackLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer's keys and values with spare capacity, so that a new column needs no copy of the whole cache."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._columns = 0

    def adopt(self, keys: Tensor, values: Tensor, columns: int) -> None:
        """Use ``keys`` and ``values`` (rows, heads, capacity, width), whose first ``columns`` columns are filled, as buffers."""
        self.dtype, self.device = keys.dtype, keys.device
        self._buffers, self._columns = (keys, values), columns
        self.keys, self.values = keys[:, :, :columns], values[:, :, :columns]
        self.is_initialized = True

    @property
    def states(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values (rows, heads, columns, width); None in a layer that never ran or uses another layer's."""
        if self._buffers is None:
            return None
        keys, values = self._buffers
        return keys[:, :, : self._columns], values[:, :, : self._columns]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append columns and return views of all keys and values so far."""
        used = self._columns
        columns = used + key_states.shape[-2]
        old_keys, old_values = self._buffers or (None, None)
        keys = _with_capacity(old_keys, key_states, used, columns)
        values = _with_capacity(old_values, value_states, used, columns)
        keys[:, :, used:columns] = key_states
        values[:, :, used:columns] = value_states
        self.adopt(keys, values, columns)
        return keys[:, :, :columns], values[:, :, :columns]


class KvCache(Cache):  # type: ignore[misc]
    """Cache of any model with attention layers only. Its layers are made by the first forward pass."""

    def __init__(self, layers: list[SlackLayer] | None = None) -> None:
        super().__init__(layer_class_to_replicate=SlackLayer)
        self.layers.extend(layers or ())

    @property
    def states(self) -> list[tuple[Tensor, Tensor] | None]:
        """``SlackLayer.states`` of every layer."""
        return [layer.states for layer in self.layers if isinstance(layer, SlackLayer)]

    @property
    def columns(self) -> int:
        """Number of filled columns, padding included."""
        return next((keys.shape[2] for keys, _ in filter(None, self.states)), 0)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return next((keys.shape[0] for keys, _ in filter(None, self.states)), 0)

    def put(self, row: int, cache: "KvCache", source: int, length: int) -> None:
        """Replace row ``row`` by the last ``length`` columns of row ``source`` of ``cache``, right-aligned.

        ``length`` is at most ``columns``.
        """
        for mine, theirs in zip(self.states, cache.states, strict=True):
            if mine is None or theirs is None:
                continue
            for state, other in zip(mine, theirs, strict=True):
                # Zeros, since a masked NaN in the padding would still poison the weighted sum of the values.
                state[row, :, : state.shape[2] - length] = 0
                state[row, :, state.shape[2] - length :] = other[source, :, other.shape[2] - length :]

    def bytes_per_token(self) -> int:
        """Return the memory, in bytes, of one column of one row over all layers."""
        states = [state for pair in filter(None, self.states) for state in pair]
        return sum(state.shape[1] * state.shape[3] * state.element_size() for state in states)


@dataclass(frozen=True, slots=True)
class CachePart:
    """Rows ``source`` of ``cache`` (repeats allowed) and their rows ``destination`` in a new cache."""

    cache: KvCache
    source: list[int]
    destination: list[int]


def assemble(parts: Sequence[CachePart], columns: int) -> KvCache:
    """Return a new cache of the parts' rows with ``columns`` columns, right-aligned.

    The leftmost columns of a longer part are cut off. The caller guarantees that these columns are padding in every row
    taken.
    """
    rows = sum(len(part.source) for part in parts)
    layers = []
    for states in zip(*(part.cache.states for part in parts), strict=True):
        layer = SlackLayer()
        filled = [(part, pair) for part, pair in zip(parts, states, strict=True) if pair is not None]
        if filled:
            keys = _assemble_state([(part, pair[0]) for part, pair in filled], rows, columns)
            values = _assemble_state([(part, pair[1]) for part, pair in filled], rows, columns)
            layer.adopt(keys, values, columns)
        layers.append(layer)
    return KvCache(layers)


def _assemble_state(states: Sequence[tuple[CachePart, Tensor]], rows: int, columns: int) -> Tensor:
    _, heads, _, width = states[0][1].shape
    # Zeros, since a masked NaN in the padding would still poison the weighted sum of the values.
    made = states[0][1].new_zeros((rows, heads, columns + _slack(columns), width))
    for part, state in states:
        taken = min(columns, state.shape[2])
        source = torch.tensor(part.source, device=state.device)
        destination = torch.tensor(part.destination, device=state.device)
        picked = state[:, :, state.shape[2] - taken :].index_select(0, source)
        made[:, :, columns - taken : columns].index_copy_(0, destination, picked)
    return made


def _with_capacity(buffer: Tensor | None, added: Tensor, used: int, columns: int) -> Tensor:
    if buffer is not None and buffer.shape[2] >= columns:
        return buffer
    rows, heads, _, width = added.shape
    grown = added.new_empty((rows, heads, columns + _slack(columns), width))
    if buffer is not None:
        grown[:, :, :used] = buffer[:, :, :used]
    return grown


def _slack(columns: int) -> int:
    return max(_MIN_SLACK, columns // 4)
