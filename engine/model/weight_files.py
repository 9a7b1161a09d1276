"""A base model's own weight files in its folder. Without torch."""

import json
from pathlib import Path

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_FORM = "consolidated"
"""First word of files that hold the same weights once more, under the names of the model's first authors."""


def weight_files(folder: Path, pattern: str = "*.safetensors") -> list[Path]:
    """Return the weight files, in order of their names: the one that transformers loads, or those of the index, or all.

    Raises ``OSError`` and ``ValueError`` for an index that cannot be read.
    """
    files = [file for file in sorted(folder.glob(pattern)) if not file.name.startswith(_OTHER_FORM)]
    if folder / _WHOLE in files:
        return [folder / _WHOLE]
    index = folder / _INDEX
    if pattern != "*.safetensors" or not index.is_file():
        return files
    told = json.loads(index.read_text())
    named = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(named, dict):
        return files
    return [folder / name for name in sorted(set(named.values()))]
