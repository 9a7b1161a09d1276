"""Merges an adapter into its base's files: a Hugging Face model folder that computes what base plus adapter compute.

The base is read and written tensor by tensor, so memory holds one output file and no model. Each changed weight is
``W + (alpha / rank) B A``, added in float32 and rounded once. Where the base ties its head to its embedding and the adapter is
on the head, the merged model has a head of its own: the embedding, which serves as input too, must not change. Nothing here
imports transformers, which takes seconds.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from contracts.errors import InvalidRequest
from engine.model.adapter_folder import read_matrices
from engine.model.atomic_folder import sync
from engine.model.base_outline import ModelNames
from engine.model.stored_tensors import files_by_key

Progress = Callable[[int, int], None]
"""Told the bytes written and the bytes in all, before each file. It may raise, which ends the merge."""

SHARD_BYTES = 2 * 2**30
"""Bytes of one output file, if no tensor is larger: the memory that a merge takes."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BESIDE = (
    "*.json",
    "*.jinja",
    "tokenizer.model*",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "*.spm",
    "spiece.model",
    "LICENSE*",
)
"""Files of a base that belong to a model folder beside its weights."""
_NOT_BESIDE = ("config.json", "*.index.json", "adapter_config.json", "weft.json")
_LARGEST_BESIDE = 128 * 2**20
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor to be written: ``key`` is its new name, ``source`` its name in the base, ``layer`` the adapted layer."""

    key: str
    source: str
    layer: str | None
    size_bytes: int


class MergeSource:
    """A base's folder and an adapter for it, checked against each other."""

    def __init__(self, base: Path, names: ModelNames, adapter: Path, dtype: str | None = None) -> None:
        """Give every floating-point tensor ``dtype``, a name in ``DTYPES``, or leave it the base's.

        Raises ``InvalidRequest`` when the base cannot be merged into, or the adapter does not fit it.
        """
        if names.is_quantized:
            raise InvalidRequest("the base's weights are quantized, and a merge would round the adapter away")
        self._base = base
        self._names = names
        self._dtype = None if dtype is None else DTYPES[dtype]
        self._matrices = read_matrices(adapter).with_head(names.head)
        self._files = files_by_key(base)
        self.unties_head = names.ties_head and names.head in self._matrices.pairs
        self._weights = self._plan()
        self.total_bytes = sum(weight.size_bytes for weight in self._weights)

    def write(self, folder: Path, progress: Progress) -> None:
        """Write the merged model's files into ``folder``. Raises ``OSError``, and what ``progress`` raises."""
        shards, done = list(_shards(self._weights)), 0
        places: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for weight, tensor in self._merged(shard):
                # Told for each tensor: a large shard may take longer than an attempt that makes no progress is given.
                progress(done, self.total_bytes)
                tensors[weight.key] = tensor
                done += weight.size_bytes
            save_file(tensors, folder / name, {"format": "pt"})
            progress(done, self.total_bytes)
            # Before more is told: all files at the end may take longer than an attempt that makes no progress is given.
            sync(folder / name)
            places |= dict.fromkeys(tensors, name)
        if len(shards) > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        self._write_beside(folder)
        progress(done, self.total_bytes)

    def _plan(self) -> list[_Weight]:
        layers = {self._source_of(layer): layer for layer in self._matrices.pairs}
        own_head = None if self._names.head is None else self._stored(self._names.head)
        weights = []
        for key, file in self._files.items():
            if self.unties_head and key == own_head:
                # A copy that the base's config says to ignore.
                continue
            is_shared = self.unties_head and layers.get(key) == self._names.head
            weights.append(_Weight(key, key, None if is_shared else layers.get(key), self._size(file, key)))
            if is_shared and own_head is not None:
                weights.append(_Weight(own_head, key, self._names.head, self._size(file, key)))
        return weights

    def _source_of(self, layer: str) -> str:
        """Return the name of the layer's weight in the base's files."""
        source = layer
        if self.unties_head and layer == self._names.head and self._names.embedding is not None:
            source = self._names.embedding
        if source in self._names.converted:
            raise InvalidRequest(
                f"the base cannot be merged into: its files keep the weight of {source} in another form than the model, "
                "as one tensor of several layers or the other way round"
            )
        name = self._stored(source)
        if name not in self._files:
            raise InvalidRequest(f"the adapter does not fit the base: the base's files have no weight of {layer}")
        self._check_shape(layer, name)
        return name

    def _stored(self, layer: str) -> str:
        """Return the name that the layer's weight has, or would have, in the base's files."""
        return self._names.stored.get(f"{layer}.weight", f"{layer}.weight")

    def _check_shape(self, layer: str, key: str) -> None:
        a, b = self._matrices.pairs[layer]
        expected = [b.shape[0], a.shape[1]]
        with safe_open(self._files[key], framework="pt") as file:
            found = list(file.get_slice(key).get_shape())
        if found != (expected[::-1] if layer in self._names.conv1d else expected):
            raise InvalidRequest(f"the adapter's {layer} does not fit the base: it is for a layer of another size")

    def _size(self, path: Path, key: str) -> int:
        with safe_open(path, framework="pt") as file:
            part = file.get_slice(key)
            empty = torch.empty(0, dtype=_TORCH_DTYPES.get(part.get_dtype(), torch.float32))
            width = self._target(empty).element_size()
            return int(torch.Size(part.get_shape()).numel() * width)

    def _target(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    def _merged(self, shard: list[_Weight]) -> Iterator[tuple[_Weight, Tensor]]:
        with ExitStack() as opened:
            files: dict[Path, Any] = {}
            for weight in shard:
                path = self._files[weight.source]
                if path not in files:
                    files[path] = opened.enter_context(safe_open(path, framework="pt"))
                tensor = files[path].get_tensor(weight.source)
                if weight.layer is not None:
                    merged = tensor.float() + self._delta(weight.layer)
                    tensor = merged.to(self._dtype or tensor.dtype)
                yield weight, self._target(tensor).contiguous()

    def _delta(self, layer: str) -> Tensor:
        a, b = self._matrices.pairs[layer]
        delta = (b.float() @ a.float()).mul_(self._matrices.scaling)
        return delta.t() if layer in self._names.conv1d else delta

    def _write_beside(self, folder: Path) -> None:
        for path in sorted(self._base.iterdir()):
            is_beside = any(fnmatchcase(path.name, pattern) for pattern in _BESIDE)
            if not is_beside or any(fnmatchcase(path.name, pattern) for pattern in _NOT_BESIDE):
                continue
            if path.is_file() and path.stat().st_size <= _LARGEST_BESIDE:
                shutil.copyfile(path, folder / path.name)
        config = json.loads((self._base / _CONFIG).read_text())
        for part in (config, config.get("text_config")):
            if not isinstance(part, dict):
                continue
            if self.unties_head:
                part["tie_word_embeddings"] = False
            if self._dtype is not None:
                part.pop("torch_dtype", None)
                part["dtype"] = str(self._dtype).removeprefix("torch.")
        (folder / _CONFIG).write_text(json.dumps(config, indent=2))


_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _shards(weights: list[_Weight]) -> Iterator[list[_Weight]]:
    shard: list[_Weight] = []
    size = 0
    for weight in weights:
        if shard and size + weight.size_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(weight)
        size += weight.size_bytes
    if shard:
        yield shard
