"""Merged models compute what base plus adapter compute in plain PEFT and torch, fp32."""

import json
import os
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    HrmTextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from contracts.base_model import read_base_model_facts
from contracts.errors import InvalidRequest
from contracts.operations import LoraSettings
from engine.model import merged_model
from engine.model.adapter_folder import write_adapter_files
from engine.model.base import BaseModel
from engine.model.lora import LoraWeights
from engine.model.merged_model import MergeSource
from engine.model.skeleton import read_names

TOLERANCE = 2e-5
"""Tolerance of logits in fp32, whose products are summed in another order."""
_SIZES = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "untied": lambda: LlamaConfig(**_LLAMA, tie_word_embeddings=False),
    "tied": lambda: LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    # Files and model name their tensors differently.
    "within another model, tied": lambda: Gemma3Config(
        text_config={**_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8},
        vision_config={**_VISION, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    ),
    "another head": lambda: GPTNeoXConfig(**_SIZES, intermediate_size=48, max_position_embeddings=64),
    "experts in one tensor": lambda: Qwen3MoeConfig(
        **_LLAMA, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
    "transposed and tied": lambda: GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}

APART: dict[str, Callable[[], PretrainedConfig]] = {"layers in one tensor": lambda: HrmTextConfig(**_LLAMA)}


def make(folder: Path, name: str, *, head: bool = True) -> tuple[Path, Path]:
    """Write a base and an adapter on all of it; return their folders."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config((CONFIGS | APART)[name]()).float().save_pretrained(folder / "base")
    base = BaseModel.load(read_base_model_facts("test/base", folder / "base", None))
    settings = LoraSettings(rank=4, alpha=12.0, seed=1, train_unembed=head)
    layout = base.layout(settings)
    vector = torch.randn(layout.size, generator=torch.Generator().manual_seed(5)) * 0.1
    (folder / "adapter").mkdir()
    write_adapter_files(folder / "adapter", base, LoraWeights(settings, layout, vector))
    return folder / "base", folder / "adapter"


def merge(base: Path, adapter: Path, out: Path, dtype: str | None = None) -> list[tuple[int, int]]:
    """Merge into ``out``; return what was told of the progress."""
    told: list[tuple[int, int]] = []
    out.mkdir()
    MergeSource(base, read_names(base), adapter, dtype).write(out, lambda done, total: told.append((done, total)))
    return told


def test_each_file_is_on_the_disk_before_the_next_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that synced all of its files at the end would stand still for as long as that takes."""
    base, adapter = make(tmp_path, "untied")
    seen: list[str] = []
    monkeypatch.setattr(merged_model, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(os, "fsync", lambda file: seen.append(Path(f"/proc/self/fd/{file}").readlink().name))
    save = merged_model.save_file

    def saved(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        seen.append("saved")
        save(tensors, path, metadata)

    monkeypatch.setattr(merged_model, "save_file", saved)
    out = tmp_path / "out"
    out.mkdir()
    MergeSource(base, read_names(base), adapter).write(out, lambda done, total: seen.append("told"))
    files = sorted(path.name for path in out.glob("model-*.safetensors"))
    assert len(files) > 2
    assert [one for one in seen if one != "told"] == [one for name in files for one in ("saved", name)]
    assert seen[-1] == "told"
    assert all(after == "told" for one, after in pairwise(seen) if one != "told")


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Logits of two sequences."""
    tokens = torch.randint(0, 120, (2, 9), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits
    return found


def load(folder: Path) -> torch.nn.Module:
    """Load a model as any user does."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def by_peft(base: Path, adapter: Path) -> PeftModel:
    """Base and adapter as plain PEFT has them."""
    with warnings.catch_warnings():
        # PEFT asks for an attribute that transformers has renamed.
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(load(base), adapter)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_merged_model_computes_what_base_and_adapter_compute(name: str, tmp_path: Path) -> None:
    base, adapter = make(tmp_path, name)
    told = merge(base, adapter, tmp_path / "out")
    expected = logits(by_peft(base, adapter))
    merged = load(tmp_path / "out")
    assert (logits(load(base)) - expected).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert told[0][0] == 0
    assert told[-1] == (told[0][1], told[0][1])


def test_a_merged_model_is_plain_pefts_own_merge(tmp_path: Path) -> None:
    """An untied base, where PEFT merges exactly; weight by weight."""
    base, adapter = make(tmp_path, "untied")
    merge(base, adapter, tmp_path / "out")
    expected = by_peft(base, adapter).merge_and_unload().state_dict()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-6, rtol=1e-6)


def test_a_tied_head_gets_weights_of_its_own_and_the_embedding_stays(tmp_path: Path) -> None:
    base, adapter = make(tmp_path, "tied")
    merge(base, adapter, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    matrices = load_file(adapter / "adapter_model.safetensors")
    a, b = (matrices[f"base_model.model.lm_head.lora_{part}.weight"] for part in "AB")
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    torch.testing.assert_close(after["lm_head.weight"], before["model.embed_tokens.weight"] + 3.0 * b @ a)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_tied_head_without_an_adapter_stays_tied(tmp_path: Path) -> None:
    base, adapter = make(tmp_path, "tied", head=False)
    merge(base, adapter, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    expected = logits(by_peft(base, adapter))
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_large_models_are_written_in_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_model, "SHARD_BYTES", 16_000)
    base, adapter = make(tmp_path, "tied")
    merge(base, adapter, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert all(path.stat().st_size < 20_000 for path in files)
    expected = logits(by_peft(base, adapter))
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_merged_model_has_the_bases_weights_alone(tmp_path: Path) -> None:
    """No copy of the base under other names, as Mistral's folders hold one."""
    base, adapter = make(tmp_path, "untied")
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, base / "consolidated.safetensors")
    merge(base, adapter, tmp_path / "out")
    merged, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", base))
    assert merged.keys() == own.keys()


def test_progress_is_told_for_each_weight_however_large_its_file(tmp_path: Path) -> None:
    """One file holds them all, and takes as long as they do."""
    base, adapter = make(tmp_path, "tied")
    told = merge(base, adapter, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    counts = [done for done, _ in told]
    assert counts == sorted(counts)
    assert len(set(counts)) == len(weights) + 1


def test_another_dtype_is_every_weights_and_the_configs(tmp_path: Path) -> None:
    base, adapter = make(tmp_path, "tied")
    merge(base, adapter, tmp_path / "out", "bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype is torch.bfloat16


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    _, adapter = make(tmp_path / "other", "transposed and tied")
    base, _ = make(tmp_path, "untied")
    with pytest.raises(InvalidRequest, match="does not fit"):
        MergeSource(base, read_names(base), adapter)


@pytest.mark.parametrize("made", [True, False])
def test_a_base_that_is_not_there_is_named(tmp_path: Path, made: bool) -> None:
    base, adapter = make(tmp_path, "untied")
    wrong = tmp_path / "wrong"
    if made:
        wrong.mkdir()
    with pytest.raises(InvalidRequest, match=f"{wrong} holds no config.json"):
        MergeSource(wrong, read_names(wrong), adapter)
    MergeSource(base, read_names(base), adapter)


def renamed(base: Path, old: str, new: str) -> None:
    """Give the tensors in the base's file other names."""
    file = base / "model.safetensors"
    tensors = {key.replace(old, new): tensor for key, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("untied", "model.", ""),
        ("transposed and tied", "transformer.", ""),
        ("within another model, tied", "language_model.model.", "model.language_model."),
        ("another head", "embed_out", "lm_head"),
    ],
)
def test_a_merge_knows_the_names_with_which_transformers_loads(name: str, old: str, new: str, tmp_path: Path) -> None:
    """Files of other versions name their tensors otherwise. A merged model keeps its base's names."""
    base, adapter = make(tmp_path, name)
    renamed(base, old, new)
    expected = logits(by_peft(base, adapter))
    merge(base, adapter, tmp_path / "out")
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, atol=TOLERANCE, rtol=TOLERANCE)
    before, after = (load_file(folder / "model.safetensors").keys() for folder in (base, tmp_path / "out"))
    assert before <= after
    assert after - before <= {"lm_head.weight"}


def test_a_tied_heads_copy_in_the_files_gives_way_to_the_merged_head(tmp_path: Path) -> None:
    """The copy has the files' name of the head, and the config says to ignore it."""
    base, adapter = make(tmp_path, "within another model, tied")
    file = base / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    expected = logits(by_peft(base, adapter))
    merge(base, adapter, tmp_path / "out")
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_base_whose_files_keep_several_layers_in_one_tensor_is_refused_for_that(tmp_path: Path) -> None:
    """No fault of the adapter. One on the head alone, which the files keep as it is, can be merged."""
    base, adapter = make(tmp_path, "layers in one tensor")
    with pytest.raises(
        InvalidRequest, match=r"cannot be merged into: its files keep the weight of model\.\S+ in another"
    ):
        merge(base, adapter, tmp_path / "out")
    file = adapter / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "lm_head" in key}, file)
    expected = logits(by_peft(base, adapter))
    merge(base, adapter, tmp_path / "head")
    torch.testing.assert_close(logits(load(tmp_path / "head")), expected, atol=TOLERANCE, rtol=TOLERANCE)
