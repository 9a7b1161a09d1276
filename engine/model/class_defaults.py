"""Reads what a model's config leaves out of its file, as its class has it. Without torch until it is asked."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def class_defaults(path: Path) -> Mapping[str, int]:
    """Return the numbers in the config of the text model in the folder ``path``, with those of its class; takes seconds.

    Published files may tell only what differs from the class. Empty for a config that transformers cannot read.
    """
    text = _text_config(path)
    if text is None:
        return {}
    names = {**text.to_dict(), **text.attribute_map}
    return {name: value for name in names if isinstance(value := getattr(text, name, None), int)}


def class_layer_types(path: Path) -> Sequence[str]:
    """Return the kind of each layer's attention, as the class of the model in the folder ``path`` has it; takes seconds.

    Empty where the class tells none, or transformers cannot read the config.
    """
    return list(getattr(_text_config(path), "layer_types", None) or ())


def _text_config(path: Path) -> Any | None:
    # Imported here: transformers imports torch, which a process that only imports this module must not load.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        if "model_type" not in json.loads((path / "config.json").read_text()):
            # Transformers would guess the class from the folder's name.
            return None
        config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError):
        return None
    return config.get_text_config()
