"""The length that a vLLM server is started with, by which it also chooses how positions are computed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from contracts.base_model import read_base_model_facts

_LONGROPE = ("longrope", "su")
_ORIGINAL = "original_max_position_embeddings"


def served_length(folder: Path, length: int) -> int:
    """Return the length nearest to ``length`` with which a vLLM server of the base in ``folder`` has weft's frequencies.

    A server chooses LongRoPE's factors by its ``--max-model-len``, and weft by the base's own context.
    """
    path = folder / "config.json"
    if not path.is_file():
        return length
    own = read_base_model_facts(folder.name, folder, None).context_length
    config = json.loads(path.read_text())
    for original in _originals({**config, **config.get("text_config", {})}, own):
        length = max(length, original + 1) if own > original else min(length, original)
    return length


def _originals(config: Mapping[str, Any], own: int) -> Iterator[int]:
    """Yield the lengths beyond which LongRoPE's long factors are meant, one for each kind of layers that has it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for settings in (rope, *(of_layer for of_layer in rope.values() if isinstance(of_layer, Mapping))):
        if settings.get("rope_type", settings.get("type")) in _LONGROPE:
            yield config.get(_ORIGINAL) or settings.get(_ORIGINAL) or own
