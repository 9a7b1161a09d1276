"""Adapters on disk: PEFT's own format, plus the optimiser state and gradients that training needs to go on.

    adapter_config.json, adapter_model.safetensors   what any PEFT user loads
    optimizer.safetensors                            first and second moments, step count (training checkpoints)
    gradients.safetensors                            gradients not yet applied (snapshots)
    weft.json                                        base model and LoRA settings, exactly

A folder is written whole beside its place, synced and renamed: it is there completely or not at all.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from peft import LoraConfig, TaskType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.contracts.errors import InvalidRequest
from engine.contracts.operations import LoraSettings
from engine.training.base import BaseModel
from engine.training.lora import LoraPair, LoraWeights

CONFIG, WEIGHTS, OPTIMIZER, GRADIENTS, WEFT = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "optimizer.safetensors",
    "gradients.safetensors",
    "weft.json",
)
FORMAT_VERSION = 1
_PREFIX = "base_model.model."
_BASE_WEIGHT = ".base_layer.weight"
_STEP = "step"


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """AdamW's moments in the order of ``LoraWeights.flat()``, and how many steps were taken."""

    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    step: int


def write_adapter(
    directory: Path,
    base: BaseModel,
    weights: LoraWeights,
    *,
    optimizer: OptimizerState | None = None,
    gradients: list[Tensor] | None = None,
) -> int:
    """Write a folder and return its size in bytes. Raises ``OSError`` (a full disk), leaving nothing behind."""
    staging = directory.with_name(f".{directory.name}.{uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        _peft_config(base, weights).save_pretrained(staging)
        keys = _tensor_keys(weights)
        save_file(_on_cpu(dict(zip(keys, weights.flat(), strict=True))), staging / WEIGHTS, {"format": "pt"})
        if optimizer is not None:
            moments = dict(zip((f"exp_avg.{key}" for key in keys), optimizer.exp_avg, strict=True))
            moments |= dict(zip((f"exp_avg_sq.{key}" for key in keys), optimizer.exp_avg_sq, strict=True))
            save_file(_on_cpu(moments) | {_STEP: torch.tensor(optimizer.step)}, staging / OPTIMIZER)
        if gradients is not None:
            save_file(_on_cpu(dict(zip(keys, gradients, strict=True))), staging / GRADIENTS)
        described = {"format": FORMAT_VERSION, "base_model": base.facts.name, "lora": asdict(weights.settings)}
        (staging / WEFT).write_text(json.dumps(described, indent=2))
        size = sum(_sync(file) for file in staging.iterdir())
        _sync(staging)
        staging.rename(directory)
        _sync(directory.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return size


def read_lora_weights(directory: Path, base: BaseModel) -> LoraWeights:
    """Read an adapter, weft's or plain PEFT's, onto the base's device.

    Raises ``InvalidRequest`` when the folder is no LoRA adapter, or does not fit the base.
    """
    config = _read_json(directory / CONFIG)
    tensors = _read_tensors(directory / WEIGHTS, str(base.device))
    pairs: dict[str, LoraPair] = {}
    for name, projection in base.projections.items():
        a, b = (tensors.pop(f"{_PREFIX}{name}.lora_{part}.weight", None) for part in "AB")
        if a is None or b is None:
            continue
        rank = b.shape[-1]
        if a.shape != (rank, projection.in_features) or b.shape != (projection.out_features, rank):
            raise InvalidRequest(f"the adapter's {name} does not fit base model {base.facts.name!r}")
        pairs[name] = LoraPair(a.float(), b.float())
    _drop_base_weights(tensors, base)
    if tensors or not pairs:
        unexpected = next(iter(tensors), "nothing")
        raise InvalidRequest(f"the adapter does not fit base model {base.facts.name!r}: it holds {unexpected}")
    settings = _settings(directory, config, base, pairs)
    if any(pair.a.shape[0] != settings.rank for pair in pairs.values()):
        raise InvalidRequest(f"the adapter says rank {settings.rank}, and holds tensors of another")
    return LoraWeights(settings, pairs)


def _drop_base_weights(tensors: dict[str, Tensor], base: BaseModel) -> None:
    """PEFT stores the frozen head along with an adapter on it: fine where it is this base's own."""
    own = dict(base.model.named_parameters())
    for key in [key for key in tensors if key.endswith(_BASE_WEIGHT)]:
        weight = own.get(key.removeprefix(_PREFIX).removesuffix(_BASE_WEIGHT) + ".weight")
        if weight is not None and weight.shape == tensors[key].shape and torch.equal(weight, tensors[key].to(weight)):
            del tensors[key]


def read_optimizer(directory: Path, weights: LoraWeights) -> OptimizerState | None:
    """The optimiser state, None if the folder holds none. Raises ``InvalidRequest`` when it does not fit ``weights``."""
    path = directory / OPTIMIZER
    if not path.is_file():
        return None
    tensors = _read_tensors(path, str(weights.flat()[0].device))
    if _STEP not in tensors:
        raise _damaged()
    return OptimizerState(
        exp_avg=_in_order(tensors, weights, "exp_avg."),
        exp_avg_sq=_in_order(tensors, weights, "exp_avg_sq."),
        step=int(tensors[_STEP]),
    )


def read_gradients(directory: Path, weights: LoraWeights) -> list[Tensor] | None:
    """Gradients not yet applied, None if the folder holds none. Raises ``InvalidRequest`` as above."""
    path = directory / GRADIENTS
    if not path.is_file():
        return None
    return _in_order(_read_tensors(path, str(weights.flat()[0].device)), weights, "")


def _in_order(tensors: Mapping[str, Tensor], weights: LoraWeights, prefix: str) -> list[Tensor]:
    """A tensor for each of ``weights.flat()``, of its shape."""
    found = [tensors.get(prefix + key) for key in _tensor_keys(weights)]
    fitting = [
        tensor
        for tensor, parameter in zip(found, weights.flat(), strict=True)
        if tensor is not None and tensor.shape == parameter.shape
    ]
    if len(fitting) != len(found):
        raise _damaged()
    return fitting


def _read_tensors(path: Path, device: str) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path, device=device)
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged() from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _damaged() from error
    if not isinstance(content, dict):
        raise _damaged()
    return content


def _damaged() -> InvalidRequest:
    return InvalidRequest("the adapter cannot be read: its files are missing or damaged")


def _tensor_keys(weights: LoraWeights) -> list[str]:
    return [f"{_PREFIX}{name}.lora_{part}.weight" for name in weights.tensors for part in "AB"]


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _peft_config(base: BaseModel, weights: LoraWeights) -> LoraConfig:
    return LoraConfig(
        r=weights.settings.rank,
        lora_alpha=_integral(weights.settings.alpha),
        target_modules=_target_modules(base, weights),
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=base.is_conv1d,
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base.facts.name,
        inference_mode=True,
    )


def _integral(alpha: float) -> Any:
    """PEFT types alpha as int but computes with any number."""
    return int(alpha) if alpha == int(alpha) else alpha


def _target_modules(base: BaseModel, weights: LoraWeights) -> list[str]:
    """Last parts of the names (``q_proj``) where they name exactly the adapted layers, else whole names."""
    suffixes = {name.rpartition(".")[2] for name in weights.tensors}
    named = {name for name in base.linear_names if name.rpartition(".")[2] in suffixes}
    return sorted(suffixes) if named == set(weights.tensors) else sorted(weights.tensors)


def _settings(
    directory: Path, config: Mapping[str, Any], base: BaseModel, pairs: Mapping[str, LoraPair]
) -> LoraSettings:
    """Exact settings of weft's own folders; told from the tensors for plain PEFT's."""
    for refused in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(refused):
            raise InvalidRequest(f"the adapter uses PEFT's {refused}, which weft does not train")
    if (directory / WEFT).is_file():
        return _own_settings(_read_json(directory / WEFT))
    groups = {base.projections[name].group for name in pairs}
    return LoraSettings(
        rank=next(iter(pairs.values())).a.shape[0],
        alpha=float(config.get("lora_alpha", 1.0)),
        train_attn="attn" in groups,
        train_mlp="mlp" in groups,
        train_unembed="unembed" in groups,
    )


def _own_settings(described: Mapping[str, Any]) -> LoraSettings:
    if described.get("format") != FORMAT_VERSION:
        raise InvalidRequest(
            f"the adapter is of format {described.get('format')}; this weft reads format {FORMAT_VERSION}"
        )
    try:
        return LoraSettings(**described["lora"])
    except (KeyError, TypeError) as error:
        raise _damaged() from error


def _sync(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
