"""Architectures whose output heads vLLM adapts are those of the installed vLLM's classes."""

import json
import subprocess

from contracts.adapted_heads import ADAPTED_HEADS
from tests.conftest import missing_service
from tests.e2e.conftest import VLLM_PYTHON

ASKED = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Phi3ForCausalLM",
    "GraniteForCausalLM",
    "DeepseekV3ForCausalLM",
)
SECONDS = 300
LOOK = """
import importlib, json, sys
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS
def adapts(name):
    module, kind = _TEXT_GENERATION_MODELS[name]
    found = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), kind)
    return "lm_head" in getattr(found, "embedding_modules", {})
print(json.dumps({name: adapts(name) for name in sys.argv[1:]}))
"""


def test_the_architectures_are_those_of_the_installed_vllm() -> None:
    if not VLLM_PYTHON.exists():
        missing_service("vLLM", "no .venv-vllm; run: make vllm")
    found = subprocess.run([VLLM_PYTHON, "-c", LOOK, *ASKED], capture_output=True, text=True, timeout=SECONDS)
    assert found.returncode == 0, found.stderr[-2000:]
    assert json.loads(found.stdout.splitlines()[-1]) == {name: name in ADAPTED_HEADS for name in ASKED}
