"""Reads and writes PEFT adapter folders without torch: checks that vLLM does not make, and an adapter of zeros."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import safetensors
from safetensors.numpy import save

from contracts.errors import InvalidRequest
from engine.model.unreadable import why_unreadable
from engine.model.weight_files import weight_files
from engine.sampling.replica import AdapterVersion

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEAD = ".lm_head."
_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_BFLOAT16_EXPONENT = 0x7F80
_ATTENTION_OUTPUT = re.compile(
    r"^(.*\.(?:self_attn|attn|attention|self_attention)\.(?:o_proj|out_proj|dense))\.weight$"
)


def check_adapter(version: AdapterVersion, *, max_rank: int, head_adapters: bool) -> None:
    """Raise ``InvalidRequest`` for a folder that is no adapter, exceeds the replica's limits or has weights not finite.

    Raises ``FilesUnread`` for one that cannot be reached.
    vLLM loads weights that are not finite without an error, and their NaN spreads through its cache to other requests.
    """
    try:
        config = json.loads(_read(version.directory / _CONFIG))
        content = _read(version.directory / _WEIGHTS)
        tensors = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        rank = max([int(config["r"])] + [held["shape"][0] for key, held in tensors if ".lora_A." in key])
    except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise _damaged() from error
    if rank > max_rank:
        raise InvalidRequest(f"adapter {version.name}: its rank {rank} exceeds the sampler's limit of {max_rank}")
    if not head_adapters and any(_HEAD in key for key, _ in tensors):
        raise InvalidRequest(
            f"adapter {version.name}: it changes lm_head, which this sampler does not serve; train without the head"
        )
    if not all(_is_finite(version, held) for _, held in tensors):
        raise InvalidRequest(f"adapter {version.name}: its weights are not finite; its training has diverged")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise why_unreadable(path, error, _damaged()) from error


def _damaged() -> InvalidRequest:
    return InvalidRequest("the adapter cannot be read: its files are missing or damaged")


def _is_finite(version: AdapterVersion, tensor: Mapping[str, Any]) -> bool:
    if tensor["dtype"] == "BF16":
        bits = np.frombuffer(tensor["data"], np.uint16)
        return not bool(((bits & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any())
    if tensor["dtype"] not in _FLOATS:
        raise InvalidRequest(f"adapter {version.name}: its weights are of type {tensor['dtype']}; save it as float32")
    return bool(np.isfinite(np.frombuffer(tensor["data"], _FLOATS[tensor["dtype"]])).all())


def write_zero_adapter(directory: Path, base: Path) -> None:
    """Write an adapter that changes nothing to ``directory``: rank 1, B zero, on one attention layer of the model ``base``.

    Writes the same bytes for the same base, and replaces each file at once. Raises ``InvalidRequest`` when the base has
    no attention layer of a known name.
    """
    module, (out_features, in_features) = _attention_output(base)
    weights = save(
        {
            f"base_model.model.{module}.lora_A.weight": np.zeros((1, in_features), np.float32),
            f"base_model.model.{module}.lora_B.weight": np.zeros((out_features, 1), np.float32),
        },
        {"format": "pt"},
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 1,
        "lora_alpha": 1,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [module.rpartition(".")[2]],
        "inference_mode": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / _WEIGHTS, weights)
    _replace(directory / _CONFIG, json.dumps(config, indent=2).encode())


def _attention_output(base: Path) -> tuple[str, tuple[int, int]]:
    """Return the module name and weight shape (out, in) of the first output projection of an attention layer."""
    for file in weight_files(base):
        with safetensors.safe_open(file, framework="numpy") as tensors:
            for key in sorted(tensors.keys()):
                if found := _ATTENTION_OUTPUT.match(key):
                    out_features, in_features = tensors.get_slice(key).get_shape()
                    return found[1], (out_features, in_features)
    raise InvalidRequest("the base model's folder has no safetensors files with an attention layer weft knows")


def _replace(path: Path, content: bytes) -> None:
    staging = path.with_name(f".{path.name}.{uuid4().hex}")
    staging.write_bytes(content)
    os.replace(staging, path)
