"""Tiny bases whose rotary frequencies depend on a length."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config, PhimoeConfig, PretrainedConfig

from contracts.base_model import BaseModelFacts
from engine.model.base import BaseModel

ORIGINAL, OWN = 64, 256
"""Length beyond which frequencies change, and the longest sequence."""
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.5 + 2 * place for place in range(8)]}


def _longrope(own: int) -> PretrainedConfig:
    return Phi3Config(
        **_SIZES,
        max_position_embeddings=own,
        original_max_position_embeddings=ORIGINAL,
        rope_scaling={"type": "longrope", **_FACTORS},
    )


def _longrope_by_layer(own: int) -> PretrainedConfig:
    turning = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": ORIGINAL,
        **_FACTORS,
    }
    layers = ["sliding_attention", "full_attention"]
    fixed = {"rope_type": "default", "rope_theta": 10_000.0}
    return Gemma3TextConfig(
        **_SIZES,
        head_dim=16,
        max_position_embeddings=own,
        sliding_window=own,
        layer_types=layers,
        rope_parameters=dict(zip(layers, (fixed, turning), strict=True)),
    )


def config_of(name: str, own: int = OWN) -> PretrainedConfig:
    """The config of a base: ``longrope``, ``mscale`` (a scale of each length), ``by layer`` (on one of two) or ``dynamic``."""
    if name == "dynamic":
        scaling = {"rope_type": "dynamic", "factor": 4.0}
        return LlamaConfig(**_SIZES, max_position_embeddings=ORIGINAL, rope_scaling=scaling)
    if name == "longrope":
        return _longrope(own)
    if name == "by layer":
        return _longrope_by_layer(own)
    scales = {"short_mscale": 1.1, "long_mscale": 1.4, "original_max_position_embeddings": ORIGINAL}
    return PhimoeConfig(
        **_SIZES,
        max_position_embeddings=own,
        num_local_experts=2,
        rope_scaling={"rope_type": "longrope", **_FACTORS, **scales},
    )


def write_base(config: PretrainedConfig, folder: Path) -> Path:
    """Write a base of random weights, large enough that positions matter."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    return folder


def load_base(folder: Path, context_length: int = OWN) -> BaseModel:
    """The base, served with a context."""
    return BaseModel.load(BaseModelFacts("turning", folder, "any", context_length, 97, None))
