"""Memory of a server on each of its GPUs, beside keys and values: reckoned by hand for a published base."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import EngineFailure
from engine.machine_memory import Gpu
from engine.sampling.vllm.model_memory import ModelMemory
from engine.sampling.vllm.server_memory import MemoryNeed, give_on_gpus

GIB, MIB = 2**30, 2**20
LAYERS, HIDDEN, INTERMEDIATE, HEADS, GROUPS, VOCABULARY = 32, 4096, 14_336, 32, 8, 128_256
LLAMA_8B = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": GROUPS,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "dtype": "bfloat16",
}
WEIGHTS = 16_060_522_496
CONTEXT = 131_072
H100 = 81_559 * MIB
"""Memory of an H100 as nvidia-smi tells it."""
PLACE = 64 * 4 * 2
"""Bytes of one number for each unit of rank: rank 64, 4 places, 2 bytes."""


def base(folder: Path, *, head: bool = True, **changes: Any) -> ModelMemory:
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | changes))
    index = {"metadata": {"total_size": WEIGHTS}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ModelMemory.read(folder, dtype="bfloat16", max_rank=64, adapters=4, head=head)


def test_llama_8b_with_its_whole_context_starts_beside_a_trainer_on_one_h100(tmp_path: Path) -> None:
    need = MemoryNeed(model=base(tmp_path), context_length=CONTEXT, sequences=256)
    layers = LAYERS * (7 * HIDDEN + 2 * HEADS * 128 + 2 * GROUPS * 128 + 3 * INTERMEDIATE)
    adapters = (layers + 2 * (HIDDEN + VOCABULARY)) * PLACE
    step = 8192 * (2 * INTERMEDIATE + 4 * HIDDEN) * 2 + 256 * VOCABULARY * 12
    fixed = WEIGHTS + adapters + step + 3 * GIB
    cache = (CONTEXT + 256) * LAYERS * 2 * GROUPS * 128 * 2
    assert need.fixed_on_gpu(8192) == fixed
    assert [step / GIB, cache / GIB] == pytest.approx([1.05, 16.0], abs=0.05)
    # The trainer has the base, too: the whole context is beyond the half of what is left, and is there.
    free = H100 - WEIGHTS - GIB
    assert fixed + cache > free // 2
    memory = give_on_gpus(need, [Gpu(0, "a", H100, free)], [])
    assert (memory.given, memory.kv_cache) == (fixed + cache, cache)
    with pytest.raises(EngineFailure, match=rf"needs {(fixed + cache) / GIB:.1f} GiB"):
        give_on_gpus(need, [Gpu(0, "a", H100, fixed + cache)], [])


def test_without_the_size_of_a_token_all_that_is_left_is_for_keys_and_values() -> None:
    need = MemoryNeed(model=ModelMemory(weights=GIB, adapters=0, token=None), context_length=128, sequences=2)
    memory = give_on_gpus(need, [Gpu(0, "a", 80 * GIB, 40 * GIB)], [])
    assert (memory.given, memory.kv_cache) == (20 * GIB, 16 * GIB)
    with pytest.raises(EngineFailure):
        give_on_gpus(need, [Gpu(0, "a", 80 * GIB, 4 * GIB)], [])


def test_a_smaller_gpu_has_smaller_steps_and_an_operators_number_wins(tmp_path: Path) -> None:
    need = MemoryNeed(model=base(tmp_path), context_length=8192, sequences=256)
    small = [Gpu(0, "a", 48 * GIB, 24 * GIB)]
    asked = replace(need, batched_tokens=16_384)
    least, large = (one.fixed_on_gpu(tokens) for one, tokens in ((need, 2048), (asked, 16_384)))
    token = (2 * INTERMEDIATE + 4 * HIDDEN) * 2
    assert large - least == (16_384 - 2048) * token
    room = int((least + need.sequence_bytes(8192, 4096)) / 0.9) + 2
    assert give_on_gpus(need, [replace(small[0], free=room)], []).given > 0
    with pytest.raises(EngineFailure):
        give_on_gpus(asked, [replace(small[0], free=room)], [])


def test_a_server_that_scores_prompts_has_room_for_the_logits_of_a_whole_step(tmp_path: Path) -> None:
    """vLLM makes the logits of every token of a prompt's part at once; weft's own forward scores beside adapters on the head."""
    need = MemoryNeed(model=base(tmp_path, head=False), context_length=8192, sequences=256)
    scoring = replace(need, scores_prompts=True)
    assert scoring.fixed_on_gpu(8192) - need.fixed_on_gpu(8192) == 8192 * VOCABULARY * (2 + 4 + 2)


def test_halves_of_adapters_that_vllm_does_not_cut_are_whole_on_each_gpu(tmp_path: Path) -> None:
    model = base(tmp_path)
    vocabulary = (HIDDEN + VOCABULARY) * PLACE
    cut = LAYERS * (2 * HEADS * 128 + 2 * GROUPS * 128 + 3 * INTERMEDIATE) * PLACE
    whole = LAYERS * 7 * HIDDEN * PLACE
    assert (model.adapters, model.whole) == (cut + whole + vocabulary, whole)
    assert (model.head, model.embedding) == (vocabulary, vocabulary)
    assert model.on_each_gpu(1, 1) == WEIGHTS + cut + whole + 2 * vocabulary
    assert model.on_each_gpu(4, 1) == (WEIGHTS + cut) // 4 + whole + 2 * vocabulary
    assert model.on_each_gpu(2, 2) == (WEIGHTS + cut) // 4 + whole // 2 + 2 * vocabulary
    without = base(tmp_path, head=False)
    assert (without.adapters, without.head, without.embedding) == (cut + whole, 0, 0)


def test_places_for_adapters_are_those_that_vllm_makes(tiny_model_dir: Path) -> None:
    """The bytes of ``lora_a_stacked`` and ``lora_b_stacked`` in vLLM 0.32 on a CPU, with 2 places of rank 8, by layer."""
    qkv, out, gate_up, down = (98_304, 65_536), (32_768, 32_768), (65_536, 131_072), (65_536, 32_768)
    head = embedding = 8192 + 20_480
    model = ModelMemory.read(tiny_model_dir, dtype="float32", max_rank=8, adapters=2)
    assert model.adapters == sum(qkv) + sum(out) + sum(gate_up) + sum(down) + head
    assert model.whole == qkv[0] + out[1] + gate_up[0] + down[1]
    assert (model.head, model.embedding) == (head, embedding)


def test_keys_and_values_are_cut_over_no_more_gpus_than_they_have_heads(tmp_path: Path) -> None:
    assert base(tmp_path).cache_parts(4, 1) == 4
    assert base(tmp_path, num_key_value_heads=2).cache_parts(4, 3) == 2 * 3
    latent = base(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64)
    assert latent.cache_parts(4, 1) == 1
    assert ModelMemory(weights=1, adapters=0, token=1).cache_parts(4, 1) == 4
    gpus = [Gpu(place, name, H100, H100) for place, name in enumerate("abcd")]
    few = MemoryNeed(
        model=base(tmp_path, num_key_value_heads=2), context_length=CONTEXT, sequences=8, gpus_each=4, trainer_gpu=None
    )
    needed = few.fixed_on_gpu(8192) + few.sequence_bytes(CONTEXT, 16_384) // 2
    small = [replace(gpu, free=int((needed - MIB) / 0.9)) for gpu in gpus]
    with pytest.raises(EngineFailure, match=r"at most \d+"):
        give_on_gpus(few, small, [])
