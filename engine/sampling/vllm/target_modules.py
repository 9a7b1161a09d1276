"""Layers that a vLLM server prepares for adapters, where a base has routed experts, which no adapter of weft's changes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from engine.model.routers import ROUTERS
from engine.model.weight_files import weight_files

_LAYER = re.compile(r"\.\d+\.")
_WEIGHT = ".weight"
_EXPERTS = "experts"
_MATRIX = 2
_LARGEST_HEADER = 2**26


def modules_beside_experts(model: Path) -> tuple[str, ...] | None:
    """Return the last names of the linear layers of the base in the folder ``model``, routed experts and routers left out.

    None for a base without routed experts, and for files other than safetensors. Left to itself, vLLM prepares every expert
    for adapters: that takes memory on a GPU, and its kernels for it do not run on a CPU.
    """
    names: set[str] = set()
    has_experts = False
    for name, dimensions in _tensors(model):
        parts = name.removesuffix(_WEIGHT).split(".")
        if _EXPERTS in parts:
            has_experts = True
        elif name.endswith(_WEIGHT) and dimensions == _MATRIX and _LAYER.search(name) and parts[-1] not in ROUTERS:
            names.add(parts[-1])
    return tuple(sorted(names)) if has_experts else None


def _tensors(model: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of dimensions of every tensor."""
    for file in weight_files(model):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= _LARGEST_HEADER else {}
        for name, tensor in header.items():
            yield name, len(tensor.get("shape", ()))
