"""One forward pass of a causal model over a batch with a KV cache and adapters, the same for every architecture."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from contracts.errors import InvalidRequest
from engine.model.base import BaseModel
from engine.model.lora import AdapterSegment, LoraWeights
from engine.sampling.in_process.kv_cache import KvCache
from engine.sampling.in_process.stacked_adapters import MAX_STACKED_RANK, AdapterStack, RowAdapters, StackHooks

_CACHEABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


ActiveAdapters = Sequence[AdapterSegment] | RowAdapters
"""Adapters of a batch: by segment of rows for prompts (many tokens a row), by row for decoding (one token a row)."""


class ForwardPass:
    """The base's model, called with the arguments that its ``forward`` accepts.

    Raises ``InvalidRequest`` for a model with recurrent layers, whose state is not keys and values.
    """

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        accepted = inspect.signature(base.model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_keep = "logits_to_keep" in accepted
        layer_types = getattr(base.model.config.get_text_config(), "layer_types", None) or ()
        foreign = sorted(set(layer_types) - _CACHEABLE_LAYERS)
        if foreign:
            raise InvalidRequest(
                f"base model {base.facts.name!r}: the in-process sampler serves attention layers only, "
                f"not {', '.join(foreign)}"
            )
        self._hooks = StackHooks(base.model, list(base.projections))

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._hooks.remove()

    @property
    def device(self) -> torch.device:
        """Device that the inputs must be on."""
        device: torch.device = self._base.device
        return device

    @property
    def vocabulary_size(self) -> int:
        """V, the number of logits of a position."""
        return self._base.facts.vocabulary_size

    def __call__(
        self,
        token_ids: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        cache: KvCache,
        adapters: ActiveAdapters,
        keep: int,
    ) -> Tensor:
        """Return the logits (rows, keep, V) of the last ``keep`` columns, in the model's dtype; ``cache`` grows in place.

        ``token_ids`` and ``positions``: int64 (rows, new columns). ``mask``: bool (rows, all columns), None when no row
        has padding.
        """
        options: dict[str, Tensor | int] = {}
        if self._takes_positions:
            options["position_ids"] = positions
        if self._takes_keep:
            options["logits_to_keep"] = keep
        with self._hooks.active(adapters) if isinstance(adapters, RowAdapters) else self._base.adapters(adapters):
            output = self._base.model(
                input_ids=token_ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options
            )
        logits: Tensor = output.logits
        return logits[:, -keep:]


class DecodeAdapters:
    """Choice between stacked adapters and segments for a decoding batch. A stack is reused while it covers the batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stack = AdapterStack(())

    def on(self, rows: Sequence[LoraWeights | None]) -> ActiveAdapters:
        """Return the adapters to activate for a batch whose row i uses ``rows[i]``; None is the bare base."""
        distinct = list(dict.fromkeys(adapter for adapter in rows if adapter is not None))
        if len(distinct) <= 1 or sum(adapter.settings.rank for adapter in distinct) > MAX_STACKED_RANK:
            return adapter_segments(rows)
        if not self._stack.covers(rows) or len(self._stack) > 2 * len(distinct):
            self._stack = AdapterStack(distinct)
        return self._stack.on(rows, self._device)

    def clear(self) -> None:
        """Free the stack."""
        self._stack = AdapterStack(())


def adapter_segments(adapters: Sequence[LoraWeights | None]) -> list[AdapterSegment]:
    """Return one segment for each run of rows with the same adapter; rows of None are in no segment."""
    segments: list[AdapterSegment] = []
    start = 0
    for end in range(1, len(adapters) + 1):
        if end < len(adapters) and adapters[end] is adapters[start]:
            continue
        adapter = adapters[start]
        if adapter is not None:
            segments.append(AdapterSegment(adapter, start, end))
        start = end
    return segments
