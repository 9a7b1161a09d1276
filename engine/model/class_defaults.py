"""Reads what a model's config leaves out of its file, as its class has it. Without torch until it is asked."""

import json
from collections.abc import Mapping
from pathlib import Path


def class_defaults(path: Path) -> Mapping[str, int]:
    """Return the numbers in the config of the text model in the folder ``path``, with those of its class; takes seconds.

    Published files may tell only what differs from the class. Empty for a config that transformers cannot read.
    """
    # Imported here: transformers imports torch, which a process that only imports this module must not load.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        if "model_type" not in json.loads((path / "config.json").read_text()):
            # Transformers would guess the class from the folder's name.
            return {}
        config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError):
        return {}
    text = config.get_text_config()
    names = {**text.to_dict(), **text.attribute_map}
    return {name: value for name in names if isinstance(value := getattr(text, name, None), int)}
