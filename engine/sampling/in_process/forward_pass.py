"""One forward of a causal model over cached rows, the same for every architecture."""

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
"""By segment for many tokens a row (prompts), by row for one (decoding)."""


class ForwardPass:
    """Calls the base's model with what its ``forward`` accepts.

    Raises ``InvalidRequest`` for a model with recurrent layers: their state is not one of keys and values.
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
        """Leave the model as it was."""
        self._hooks.remove()

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        device: torch.device = self._base.device
        return device

    @property
    def vocabulary_size(self) -> int:
        """V, in tokens."""
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
        """Logits (rows, keep, V), in the model's dtype, of the last ``keep`` columns; ``cache`` grows in place.

        ``token_ids`` and ``positions`` int64 (rows, new columns); ``mask`` (rows, all columns) bool, or None when no
        row has padding.
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
    """Chooses how a decoding batch applies its adapters, and keeps a stack for as long as it serves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stack = AdapterStack(())

    def on(self, rows: Sequence[LoraWeights | None]) -> ActiveAdapters:
        """For rows with these adapters, None being the bare base."""
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
    """One segment a run of equal neighbours; rows of None stay uncovered."""
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
