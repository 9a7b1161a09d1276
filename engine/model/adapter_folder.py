"""Writes LoRA weights to adapter folders in PEFT's own format, and reads such folders onto a base model.

adapter_config.json, adapter_model.safetensors   PEFT's files; any PEFT user can load them
weft.json                                        base model and exact LoRA settings
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from contracts.errors import InvalidRequest
from contracts.operations import LoraSettings
from engine.model.base_outline import AdapterBase
from engine.model.lora import LoraLayout, LoraPair, LoraWeights
from engine.model.plain_lora import check_config
from engine.model.unreadable import has_file, why_unreadable

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG, WEIGHTS, WEFT = "adapter_config.json", "adapter_model.safetensors", "weft.json"
FORMAT_VERSION = 1
_PREFIX = "base_model.model."
TINKER_HEAD = "model.unembed_tokens"
"""Name of the output layer in adapters of the hosted service, and in external files of a tied base."""
_BASE_WEIGHT = ".base_layer.weight"


def write_adapter_files(folder: Path, base: AdapterBase, weights: LoraWeights) -> None:
    """Write config, matrices and settings of ``weights`` into ``folder``. Raises ``OSError``."""
    peft_config(base, weights).save_pretrained(folder)
    save_file(matrices_by_key(weights.layout, weights.vector), folder / WEIGHTS, {"format": "pt"})
    described = {"format": FORMAT_VERSION, "base_model": base.name, "lora": asdict(weights.settings)}
    (folder / WEFT).write_text(json.dumps(described, indent=2))


def read_lora_weights(directory: Path, base: AdapterBase, device: str | None = None) -> LoraWeights:
    """Read an adapter, weft's or plain PEFT's, onto ``device``, by default the base's.

    Raises ``InvalidRequest`` when the folder is no LoRA adapter, or does not fit the base, and ``FilesUnread``.
    """
    config = _read_json(directory / CONFIG)
    tensors = _by_module_name(read_tensors(directory / WEIGHTS, device or str(base.device)), base)
    pairs: dict[str, LoraPair] = {}
    for name, projection in base.projections.items():
        a, b = (tensors.pop(f"{_PREFIX}{name}.lora_{part}.weight", None) for part in "AB")
        if a is None and b is None:
            continue
        if a is None or b is None:
            raise damaged()
        rank = b.shape[-1]
        if a.shape != (rank, projection.in_features) or b.shape != (projection.out_features, rank):
            raise InvalidRequest(f"the adapter's {name} does not fit base model {base.name!r}")
        pairs[name] = LoraPair(a.float(), b.float())
    _drop_frozen_head(tensors, base)
    if tensors or not pairs:
        unexpected = next(iter(tensors), "nothing")
        raise InvalidRequest(f"the adapter does not fit base model {base.name!r}: it holds {unexpected}")
    settings = _settings(directory, config, base, pairs)
    if any(pair.a.shape[0] != settings.rank for pair in pairs.values()):
        raise InvalidRequest(f"the adapter says rank {settings.rank}, and holds tensors of another")
    layout = LoraLayout(settings.rank, {name: base.projections[name] for name in pairs})
    return LoraWeights(settings, layout, layout.vector(pairs))


def _by_module_name(tensors: dict[str, Tensor], base: AdapterBase) -> dict[str, Tensor]:
    """Return the tensors with the output layer by its module's name."""
    hosted, own = f"{_PREFIX}{TINKER_HEAD}.", f"{_PREFIX}{base.output_name}."
    named = {key: key.replace(hosted, own) if key.startswith(hosted) else key for key in tensors}
    if len(set(named.values())) < len(tensors):
        raise damaged()
    return {named[key]: tensor for key, tensor in tensors.items()}


def _drop_frozen_head(tensors: dict[str, Tensor], base: AdapterBase) -> None:
    """Drop a frozen head that equals the base's own: PEFT stores it along with an adapter on it."""
    key = f"{_PREFIX}{base.output_name}{_BASE_WEIGHT}"
    if key in tensors and base.is_own_head(tensors[key]):
        del tensors[key]


@dataclass(frozen=True, slots=True)
class AdapterMatrices:
    """An adapter's matrices A (rank, in) and B (out, rank) by layer, and the factor of their product."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float

    def with_head(self, name: str | None) -> "AdapterMatrices":
        """Return the same with the output layer by its module's ``name``, if it has the hosted service's."""
        if name is None or TINKER_HEAD not in self.pairs or name in self.pairs:
            return self
        named = {name if layer == TINKER_HEAD else layer: pair for layer, pair in self.pairs.items()}
        return AdapterMatrices(named, self.scaling)


def read_matrices(directory: Path) -> AdapterMatrices:
    """Read an adapter, weft's or plain PEFT's, without its base. Raises ``InvalidRequest`` when it is no LoRA adapter."""
    config = _read_json(directory / CONFIG)
    check_config(config)
    tensors = read_tensors(directory / WEIGHTS, "cpu")
    layers = {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in tensors if ".lora_" in key}
    pairs = {}
    for layer in sorted(layers):
        a, b = (tensors.get(f"{_PREFIX}{layer}.lora_{part}.weight") for part in "AB")
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or not a.shape[0] == b.shape[1] == config.get("r"):
            raise damaged()
        pairs[layer] = (a, b)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not pairs or not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise damaged()
    return AdapterMatrices(pairs, alpha / rank)


def matrices_by_key(layout: LoraLayout, vector: Tensor) -> dict[str, Tensor]:
    """Return the vector's matrices by PEFT's names, on the CPU, each with storage of its own."""
    pairs = layout.pairs(vector.cpu())
    return {
        f"{_PREFIX}{name}.lora_{part}.weight": tensor.clone()
        for name, pair in pairs.items()
        for part, tensor in (("A", pair.a), ("B", pair.b))
    }


def vector_from_keys(layout: LoraLayout, tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    """Return the vector, float32 (layout.size,), of matrices named ``prefix`` plus their name in ``matrices_by_key``.

    Raises ``InvalidRequest`` when a matrix is missing or of another shape.
    """
    pairs = {}
    for name, shapes in layout.shapes().items():
        a, b = (tensors.get(f"{prefix}{_PREFIX}{name}.lora_{part}.weight") for part in "AB")
        if a is None or b is None or (a.shape, b.shape) != shapes:
            raise damaged()
        pairs[name] = LoraPair(a, b)
    return layout.vector(pairs)


def read_tensors(path: Path, device: str) -> dict[str, Tensor]:
    """Read a safetensors file and return its tensors by name.

    Raises ``InvalidRequest`` when it is gone or damaged, ``FilesUnread`` when its folder cannot be reached.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path, device=device)
    except (OSError, ValueError, SafetensorError) as error:
        raise why_unreadable(path, error, damaged()) from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise why_unreadable(path, error, damaged()) from error
    if not isinstance(content, dict):
        raise damaged()
    return content


def damaged() -> InvalidRequest:
    """Return the error for a folder whose files are missing or cannot be read."""
    return InvalidRequest("the adapter cannot be read: its files are missing or damaged")


def peft_config(base: AdapterBase, weights: LoraWeights) -> "LoraConfig":
    """Return PEFT's config of the adapter."""
    # PEFT takes seconds and 100 MiB, which a process that reads adapters does without.
    from peft import LoraConfig, TaskType

    return LoraConfig(
        r=weights.settings.rank,
        lora_alpha=_integral(weights.settings.alpha),
        target_modules=_target_modules(base, weights),
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=base.is_conv1d,
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base.name,
        inference_mode=True,
    )


def _integral(alpha: float) -> Any:
    """Return ``alpha`` as an int where it is one. PEFT types alpha as int but computes with any number."""
    return int(alpha) if alpha == int(alpha) else alpha


def _target_modules(base: AdapterBase, weights: LoraWeights) -> list[str]:
    """Return PEFT's target modules: last parts of names (``q_proj``) if they name just the adapted layers, else whole names."""
    suffixes = {name.rpartition(".")[2] for name in weights.tensors}
    named = {name for name in base.linear_names if name.rpartition(".")[2] in suffixes}
    return sorted(suffixes) if named == set(weights.tensors) else sorted(weights.tensors)


def _settings(
    directory: Path, config: Mapping[str, Any], base: AdapterBase, pairs: Mapping[str, LoraPair]
) -> LoraSettings:
    """Return the settings: from ``weft.json`` in weft's own folders, told from the tensors in plain PEFT's."""
    check_config(config)
    if has_file(directory / WEFT):
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
        raise damaged() from error
