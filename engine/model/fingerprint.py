"""Fingerprint of a base model's weights: tells whether two processes train and sample the same ones. Without torch.

The fingerprint is of the architecture's config, of each tensor's name, type and shape, and of three blocks of each tensor's
bytes: its start, middle and end. Other weights differ in every tensor. So a folder of 16 GB takes 4 MB of reads. How the
tensors are spread over files does not matter, nor does the tokenizer.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from contracts.errors import InvalidRequest
from engine.model.weight_files import weight_files

_FORMAT = "weft-base-1"
_BLOCK_BYTES = 4096
_LONGEST_HEADER = 100 * 2**20
_WRITERS_OWN = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Keys of the config that say who wrote it, or what ``dtype`` says."""


def weights_fingerprint(folder: Path, *, dtype: str) -> str:
    """Return the fingerprint of the model in ``folder`` when it is loaded as ``dtype`` ("auto": the config's). Blocking.

    Raises ``InvalidRequest`` when the folder's files cannot be read.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        digest = hashlib.sha256(f"{_FORMAT}\n{_resolved(config, dtype)}\n".encode())
        digest.update(json.dumps(_architecture(config), sort_keys=True).encode())
        for line in sorted(_tensors(folder)):
            digest.update(line)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"the base model's files cannot be read ({type(error).__name__}); look at its folder"
        ) from error
    return digest.hexdigest()


def _resolved(config: dict[str, Any], dtype: str) -> str:
    return dtype if dtype != "auto" else str(config.get("dtype") or config.get("torch_dtype") or "auto")


def _architecture(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _architecture(item) for key, item in value.items() if key not in _WRITERS_OWN}
    return value


def _tensors(folder: Path) -> Iterator[bytes]:
    """Yield a line for each tensor, or for each file where the weights are in another format."""
    files = weight_files(folder)
    for path in files:
        with path.open("rb") as file:
            yield from _tensors_of(file)
    if not files:
        for path in weight_files(folder, "*.bin"):
            with path.open("rb") as file:
                yield _line(path.name, "", "", _sampled(file, 0, os.fstat(file.fileno()).st_size))


def _tensors_of(file: BinaryIO) -> Iterator[bytes]:
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _LONGEST_HEADER:
        raise ValueError("no safetensors file")
    header: dict[str, Any] = json.loads(file.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            sampled = _sampled(file, 8 + length + start, 8 + length + end)
            yield _line(name, tensor["dtype"], str(tensor["shape"]), sampled)


def _sampled(file: BinaryIO, start: int, end: int) -> bytes:
    digest = hashlib.sha256()
    for at in (start, (start + end) // 2, end - _BLOCK_BYTES):
        first = max(start, at)
        file.seek(first)
        digest.update(file.read(min(_BLOCK_BYTES, end - first)))
    return digest.digest()


def _line(name: str, dtype: str, shape: str, sampled: bytes) -> bytes:
    return f"{name}\0{dtype}\0{shape}\0{sampled.hex()}\n".encode()
