"""Memory of bases whose layers reach back over a window only, reckoned from their folders and given on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import EngineFailure
from engine.machine_memory import Gpu
from engine.sampling.vllm.layer_windows import CachedLayers, cached_layers
from engine.sampling.vllm.model_memory import ModelMemory
from engine.sampling.vllm.server_memory import MemoryNeed, batched_tokens, give_on_gpus, stages

GIB = 2**30
GEMMA_12B = {
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "model_type": "gemma3_text",
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
}
"""Text model of the published Gemma 3 12B, which leaves out the kinds of its layers."""
CONTEXT = 131_072
PLAIN = {"num_hidden_layers": 8, "sliding_window": 64}
KINDS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 8}, CachedLayers(8)),
        (PLAIN | {"layer_types": KINDS * 4}, CachedLayers(4, 4, 64)),
        (PLAIN | {"layer_types": KINDS * 4, "use_sliding_window": False}, CachedLayers(8)),
        (PLAIN | {"sliding_window": None, "layer_types": KINDS * 4}, CachedLayers(8)),
        (PLAIN | {"sliding_window_pattern": 4}, CachedLayers(2, 6, 64)),
        (PLAIN | {"num_hidden_layers": 62, "sliding_window_pattern": 6}, CachedLayers(10, 60, 64)),
        (PLAIN | {"num_hidden_layers": 25, "layer_types": KINDS * 12 + KINDS[:1]}, CachedLayers(13, 13, 64)),
        (PLAIN | {"layer_types": KINDS[:1] * 8}, CachedLayers(0, 8, 64)),
        # Nobody says which layers have the window.
        (PLAIN, CachedLayers(8, 0, 64)),
    ],
)
def test_layers_with_a_window_are_known_by_the_config(
    tmp_path: Path, config: dict[str, Any], layers: CachedLayers
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert cached_layers(config, tmp_path) == layers


def gemma(folder: Path, **changes: Any) -> MemoryNeed:
    text = {"model_type": "gemma3", "text_config": GEMMA_12B}
    (folder / "config.json").write_text(json.dumps(text))
    model = ModelMemory.read(folder, dtype="bfloat16", max_rank=8, adapters=2)
    return MemoryNeed(model=model, context_length=CONTEXT, sequences=256, **changes)


def test_a_layer_with_a_window_counts_it_and_the_tokens_in_flight(tmp_path: Path) -> None:
    """The class tells what the file leaves out: every sixth layer of Gemma 3 keeps the whole context."""
    need, layer = gemma(tmp_path), 2 * 8 * 256 * 2
    assert (need.model.token, need.model.sliding, need.model.window) == (48 * layer, 40 * layer, 1024)
    spare = 256
    in_flight = 2 * 8192
    expected = 8 * (CONTEXT + spare) * layer + 40 * (1024 + in_flight + spare) * layer
    assert need.sequence_bytes(CONTEXT, in_flight) == expected
    assert expected / GIB == pytest.approx(13.4, abs=0.1), "not the 48 GiB of 48 whole layers"
    # A short sequence is kept whole by all layers, and so is a long one on a CPU, where a prompt is one step.
    assert need.sequence_bytes(1000, in_flight) == 48 * (1000 + spare) * layer
    assert need.context_bytes == 48 * (CONTEXT + spare) * layer


def test_a_base_with_windows_starts_on_a_gpu_that_its_whole_context_would_not_fit(tmp_path: Path) -> None:
    gpus = [Gpu(0, "a", 80 * GIB, 50 * GIB)]
    need = gemma(tmp_path, batched_tokens=batched_tokens(["--max-num-batched-tokens=4096"]))
    assert give_on_gpus(need, gpus, []).given == 25 * GIB
    tight = [Gpu(0, "a", 80 * GIB, 10 * GIB)]
    with pytest.raises(EngineFailure, match=r"WEFT_VLLM_CONTEXT_LENGTH to at most \d+") as refused:
        give_on_gpus(need, tight, [])
    length = int(refused.value.message.partition("at most ")[2].partition(",")[0])
    # The length that is named is the longest that fits into what the server would be given.
    shorter = MemoryNeed(model=need.model, context_length=length, sequences=256, batched_tokens=4096)
    assert give_on_gpus(shorter, tight, []).given >= 5 * GIB
    assert need.fitting(need.sequence_bytes(length, 8192), 8192) == length
    assert need.fitting(need.sequence_bytes(length, 8192) - 1, 8192) == length - 1


def test_options_that_size_a_step_are_read_from_a_servers_arguments() -> None:
    assert (batched_tokens([]), stages([])) == (None, 1)
    assert batched_tokens(["--max-num-batched-tokens", "512"]) == 512
    assert stages(["-tp", "2", "--pipeline-parallel-size=3"]) == 3
