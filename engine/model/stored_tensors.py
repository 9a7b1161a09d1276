"""Tensors in a base's safetensors files, by the names that they have there."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from contracts.errors import InvalidRequest
from engine.model.weight_files import weight_files


def files_by_key(base: Path) -> dict[str, Path]:
    """Return the file of each tensor of the base. Raises ``InvalidRequest`` for a base without safetensors files."""
    found: dict[str, Path] = {}
    try:
        for path in weight_files(base):
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
    except (OSError, ValueError, SafetensorError) as error:
        raise InvalidRequest("the base cannot be merged into: a safetensors file of it cannot be read") from error
    if not found:
        raise InvalidRequest("the base cannot be merged into: it has no safetensors files")
    return found
