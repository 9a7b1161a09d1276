"""Base models of random weights that the benchmarks train on, and the floating point operations of a training step on them."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from engine.model.tiny_model import write_tiny_model

_CONTEXT = 2048
_END_OF_TEXT = 256
"""Id of the tiny tokenizer's end of text: the larger bases carry the same byte-level tokenizer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3, in features, layers, heads and tokens."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int


_SHAPES = {
    "small": Shape(8, 512, 1536, heads=8, key_value_heads=4, head_dim=64, vocabulary=4096),
    "large": Shape(16, 2048, 6144, heads=16, key_value_heads=8, head_dim=128, vocabulary=32768),
}


def write_base(name: str, directory: Path, *, dtype: str) -> None:
    """Write base ``name`` (``tiny``, ``small`` or ``large``) and its tokenizer to ``directory``, weights in ``dtype``."""
    write_tiny_model(directory)
    if name == "tiny" and dtype == "float32":
        return
    torch_dtype: torch.dtype = getattr(torch, dtype)
    config = AutoConfig.from_pretrained(directory) if name == "tiny" else _config(_SHAPES[name])
    config.dtype = dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(torch_dtype)
    model.save_pretrained(directory)


def _config(shape: Shape) -> Any:
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=_END_OF_TEXT,
        pad_token_id=_END_OF_TEXT,
    )


def step_flops(model: nn.Module, *, tokens: int, length: int, rank: int) -> float:
    """Return the least number of floating point operations of a training step of LoRA adapters.

    The step computes ``tokens`` tokens in sequences of ``length``, with adapters of ``rank`` on every linear layer and the head.

    - Frozen matrices: forward pass and gradient of the inputs, 2 x 2 for each weight and token.
    - Adapters: the gradient of their weights, too, 3 x 2 for each weight and token.
    - Causal attention: two products forward and four backward, over half of ``length``.
    """
    config: Any = model.config
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    frozen = sum(linear.in_features * linear.out_features for linear in linears)
    adapter = sum(rank * (linear.in_features + linear.out_features) for linear in linears)
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * length / 2
    each: float = 4.0 * frozen + 6.0 * adapter + 6 * 2.0 * attention
    return tokens * each


def matmul_flops_per_second(model: nn.Module, *, rows: int = 4096, seconds: float = 0.5) -> float:
    """Measure the rate of a product of the base's sizes, (rows, hidden) x (hidden, intermediate), in FLOP/s."""
    config: Any = model.config
    weight = next(model.parameters())
    left = torch.randn(rows, config.hidden_size, device=weight.device).to(weight.dtype)
    right = torch.randn(config.hidden_size, config.intermediate_size, device=weight.device).to(weight.dtype)
    for _ in range(3):
        torch.mm(left, right)
    synchronise(weight.device)
    done, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        for _ in range(5):
            torch.mm(left, right)
        synchronise(weight.device)
        done += 5
    return done * 2.0 * left.numel() * right.shape[1] / elapsed


def synchronise(device: torch.device) -> None:
    """Wait until ``device`` has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
