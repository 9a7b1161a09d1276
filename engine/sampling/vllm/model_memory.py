"""Memory that a base model takes on a vLLM server, reckoned from its folder, without loading it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from engine.model.class_defaults import class_defaults
from engine.model.weight_files import weight_files
from engine.sampling.vllm.layer_windows import CachedLayers, cached_layers

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
_SCORE_BYTES = 8
"""Bytes for each word of the vocabulary and each token of a prompt that is scored: logits in half precision, logprobs of float32,
and the comparison by which ranks are counted (``_get_prompt_logprobs_dict`` in vLLM's ``gpu_model_runner.py``)."""
_LOGIT_BYTES = 12
"""Bytes for each word of the vocabulary while a token is drawn: logits, logprobs and what is sorted, of float32 each."""


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

    - ``sliding`` of a token's bytes are those of layers that keep the last ``window`` tokens only.
    - ``whole`` and ``head`` of the adapters' bytes are not cut where each layer is spread over GPUs: the halves of layers that
      vLLM keeps on each of them, and the head's.
    - ``embedding``: bytes of the places that vLLM makes for adapters of the embedding, which weft's adapters never change.
    - ``key_value_heads``: most parts that a layer's keys and values are cut into over GPUs; 0: not known.
    - ``step_token``, ``logits``: bytes that one token of a step, and the logits of one sequence, take while they are computed.
    - ``scores``: bytes that one token of a prompt takes while the server scores it.
    """

    weights: int
    adapters: int
    token: int | None
    sliding: int = 0
    window: int = 0
    whole: int = 0
    head: int = 0
    embedding: int = 0
    key_value_heads: int = 0
    step_token: int = 0
    logits: int = 0
    scores: int = 0

    @classmethod
    def read(cls, model: Path, *, dtype: str, max_rank: int, adapters: int, head: bool = True) -> Self:
        """Reckon from ``config.json`` and the sizes of the files; ``adapters`` places hold adapters of ``max_rank``.

        ``head``: adapters may change the head, and vLLM makes places for them at the embedding, too.
        """
        config = _with_sizes(_text_config(model), model)
        width = _WIDTHS[dtype]
        stored = _stored_bytes(model)
        # Weights with fewer bits than the data type stay as they are.
        factor = 1.0 if "quantization_config" in config else width / _WIDTHS[_stored_dtype(model) or dtype]
        sizes = _Sizes.of(config)
        place = max_rank * adapters * width
        vocabulary = sizes.vocabulary_rows * place if head else 0
        layer = _layer_bytes(config, width)
        layers = CachedLayers(0) if layer is None else cached_layers(config, model)
        return cls(
            weights=int(stored * factor),
            adapters=(sizes.sharded_rows + sizes.whole_rows) * place + vocabulary,
            token=None if layer is None else (layers.full + layers.sliding) * layer,
            sliding=layers.sliding * (layer or 0),
            window=layers.window,
            whole=sizes.whole_rows * place,
            head=vocabulary,
            embedding=vocabulary,
            # A latent is on every GPU as a whole.
            key_value_heads=1 if config.get("kv_lora_rank") else sizes.key_value_heads,
            step_token=(2 * sizes.intermediate + 4 * sizes.hidden) * width,
            logits=sizes.vocabulary * _LOGIT_BYTES,
            scores=sizes.vocabulary * _SCORE_BYTES,
        )

    def on_each_gpu(self, tensor: int, stages: int) -> int:
        """Return the bytes of weights and places on each of ``tensor`` GPUs a layer, the layers being in ``stages`` parts.

        vLLM cuts B of a layer whose outputs it spreads, and A of one whose inputs it spreads. The other halves are whole on
        each GPU without ``--fully-sharded-loras``, and so are the head's and the embedding's: see ``create_lora_weights`` in
        vLLM's ``lora/layers``.
        """
        sharded = self.adapters - self.whole - self.head
        return (self.weights + sharded) // (tensor * stages) + self.whole // stages + self.head + self.embedding

    def cache_parts(self, tensor: int, stages: int) -> int:
        """Return the number of GPUs that keys and values are cut over; vLLM repeats them on more GPUs than there are heads."""
        return min(tensor, self.key_value_heads or tensor) * stages

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


class _Sizes(NamedTuple):
    """Sizes of a text model, 0 where they are not known."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    queries: int
    keys: int
    key_value_heads: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        hidden, heads = config.get("hidden_size") or 0, config.get("num_attention_heads") or 1
        head, groups = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
        intermediate = config.get("intermediate_size") or 4 * hidden
        layers, vocabulary = config.get("num_hidden_layers") or 0, config.get("vocab_size") or 0
        return cls(layers, hidden, intermediate, vocabulary, heads * head, groups * head, groups)

    @property
    def sharded_rows(self) -> int:
        """Numbers for each unit of rank that vLLM cuts: B of q, k, v, gate and up; A of o and down."""
        return self.layers * (2 * self.queries + 2 * self.keys + 3 * self.intermediate)

    @property
    def whole_rows(self) -> int:
        """Numbers for each unit of rank in the other halves, all as wide as the model."""
        return self.layers * 7 * self.hidden

    @property
    def vocabulary_rows(self) -> int:
        """Numbers for each unit of rank of the head, and as many of the embedding."""
        return self.hidden + self.vocabulary
