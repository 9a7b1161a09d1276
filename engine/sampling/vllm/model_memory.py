"""Memory that a base model takes on a vLLM server, reckoned from its folder, without loading it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine.model.class_defaults import class_defaults
from engine.model.weight_files import weight_files
from engine.sampling.vllm.layer_windows import cached_layers

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
_SAFETENSORS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 2**26


def checkpoint_dtype(model: Path) -> str:
    """Return the precision of the weights in a model's folder, as transformers reads it: float32, bfloat16 or float16.

    vLLM's own ``auto`` makes float32 weights half as precise, and the sampler would not be the model that is trained.
    """
    named = _text_config(model)
    told = named.get("dtype") or named.get("torch_dtype")
    if isinstance(told, str) and told.removeprefix("torch.") in _WIDTHS:
        return told.removeprefix("torch.")
    return _stored_dtype(model) or "float32"


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of the weights, of the places for adapters, and of one token's keys and values (None: not known).

    ``sliding`` of a token's bytes are those of layers that keep the last ``window`` tokens only.
    """

    weights: int
    adapters: int
    token: int | None
    sliding: int = 0
    window: int = 0

    @classmethod
    def read(cls, model: Path, *, dtype: str, max_rank: int, adapters: int) -> Self:
        """Reckon from ``config.json`` and the sizes of the files; ``adapters`` places hold adapters of ``max_rank``."""
        config = _with_sizes(_text_config(model), model)
        width = _WIDTHS[dtype]
        stored = _stored_bytes(model)
        # Weights with fewer bits than the data type stay as they are.
        factor = 1.0 if "quantization_config" in config else width / _WIDTHS[_stored_dtype(model) or dtype]
        rows = _adapter_rows(config)
        places = rows * max_rank * adapters * width
        layer = _layer_bytes(config, width)
        if layer is None:
            return cls(int(stored * factor), places, None)
        layers = cached_layers(config, model)
        token = (layers.full + layers.sliding) * layer
        return cls(int(stored * factor), places, token, layers.sliding * layer, layers.window)

    def sequence(self, length: int, in_flight: int) -> int:
        """Return the bytes of a sequence's keys and values; 0 where they are not known.

        ``in_flight`` tokens may be in steps that have not ended yet. A layer with a window keeps them beside it, as
        ``SlidingWindowSpec`` in vLLM's ``v1/kv_cache_interface.py`` has it.
        """
        return length * ((self.token or 0) - self.sliding) + min(length, self.window + in_flight) * self.sliding


def _stored_bytes(model: Path) -> int:
    """Bytes of the weights as they are stored. Hub folders often hold them twice, in files of another form."""
    if (model / _INDEX).is_file():
        told = json.loads((model / _INDEX).read_text()).get("metadata", {}).get("total_size")
        if isinstance(told, int):
            return told
    for pattern in ("*.safetensors", "pytorch_model*.bin", "*.bin"):
        sizes = [file.stat().st_size for file in weight_files(model, pattern)]
        if sizes:
            return sum(sizes)
    return 0


def _text_config(model: Path) -> Mapping[str, Any]:
    config = json.loads((model / "config.json").read_text())
    return {**config, **config.get("text_config", {})}


def _with_sizes(config: Mapping[str, Any], model: Path) -> Mapping[str, Any]:
    """Return the config with the sizes of the model's class where it leaves one out."""
    told = {key: value for key, value in config.items() if value is not None}
    return told if all(key in told for key in _SIZES) else {**class_defaults(model), **told}


def _stored_dtype(model: Path) -> str | None:
    """Data type of the first weights of the first safetensors file, which is the checkpoint's; None without such a file."""
    for file in weight_files(model):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= _LARGEST_HEADER else {}
        for tensor in header.values():
            if tensor.get("dtype") in _SAFETENSORS:
                return _SAFETENSORS[tensor["dtype"]]
    return None


def _layer_bytes(config: Mapping[str, Any], width: int) -> int | None:
    """Keys and values of one token in one layer."""
    layers, hidden, heads = (config.get(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if not (layers and hidden and heads):
        return None
    if latent := config.get("kv_lora_rank"):
        return int((latent + config.get("qk_rope_head_dim", 0)) * width)
    head = config.get("head_dim") or hidden // heads
    return int(2 * (config.get("num_key_value_heads") or heads) * head * width)


def _adapter_rows(config: Mapping[str, Any]) -> int:
    """Numbers that an adapter has for each unit of rank: inputs and outputs of every projection and of the head."""
    hidden, heads = config.get("hidden_size") or 0, config.get("num_attention_heads") or 1
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    perceptron = 3 * (hidden + (config.get("intermediate_size") or 4 * hidden))
    layers = config.get("num_hidden_layers") or 0
    return int(layers * (attention + perceptron) + hidden + (config.get("vocab_size") or 0))
