"""Layers of a base with routed experts that a vLLM server prepares for adapters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from contracts.base_model import read_base_model_facts
from engine.model.base import BaseModel
from engine.sampling.vllm.process import VllmProcessSettings
from engine.sampling.vllm.target_modules import modules_beside_experts

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_BASES: dict[str, tuple[PretrainedConfig, tuple[str, ...]]] = {
    "all routed": (Qwen3MoeConfig(**_SIZES, **_EXPERTS, head_dim=16), _ATTENTION),
    "shared, too": (
        Qwen2MoeConfig(**_SIZES, **_EXPERTS, shared_expert_intermediate_size=64, intermediate_size=96),
        tuple(sorted((*_ATTENTION, "gate_proj", "up_proj", "down_proj"))),
    ),
}


@pytest.mark.parametrize("name", list(_BASES))
def test_routed_experts_are_left_out_by_servers_and_trainer_alike(tmp_path: Path, name: str) -> None:
    config, wanted = _BASES[name]
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert modules_beside_experts(tmp_path) == wanted
    trained = BaseModel.load(read_base_model_facts("moe", tmp_path, None)).projections.values()
    assert {one.name.rpartition(".")[2] for one in trained if one.group != "unembed"} == set(wanted)


def test_a_base_without_experts_leaves_the_choice_to_vllm(tiny_model_dir: Path) -> None:
    assert modules_beside_experts(tiny_model_dir) is None


def test_the_head_is_among_the_chosen_layers_where_adapters_may_change_it(tmp_path: Path) -> None:
    settings = VllmProcessSettings(
        command=("vllm",),
        model=tmp_path,
        served_model="moe",
        log=tmp_path / "log",
        context_length=64,
        max_lora_rank=8,
        max_loras=2,
        max_cpu_loras=4,
        on_cpu=False,
        target_modules=_ATTENTION,
    )
    for head in (False, True):
        line = replace(settings, head_adapters=head).arguments(tmp_path / "socket")
        place = line.index("--lora-target-modules") + 1
        assert line[place : place + 5][:4] == list(_ATTENTION)
        assert ("lm_head" in line) is head
