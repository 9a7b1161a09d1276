"""A fingerprint tells weights apart, and nothing else: other files of the same weights have the same one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.errors import InvalidRequest
from engine.model.fingerprint import weights_fingerprint
from engine.model.tiny_model import write_tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def test_the_same_weights_in_other_files_have_the_same_fingerprint(folder: Path, tiny_model_dir: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    for number, some in enumerate((names[10:], names[:10])):
        save_file({name: tensors[name] for name in some}, folder / f"model-{number}.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "transformers_version": "0", "_name_or_path": "elsewhere"})
    )
    (folder / "tokenizer.json").unlink()
    assert weights_fingerprint(folder, dtype="auto") == weights_fingerprint(tiny_model_dir, dtype="auto")


@pytest.mark.parametrize("kept", ["whole", "in parts"])
def test_files_that_are_no_part_of_the_base_change_nothing(folder: Path, tiny_model_dir: Path, kept: str) -> None:
    """The weights once more under their first authors' names, and a file that transformers does not load."""
    foreign = {"layers.0.attention.wq.weight": torch.ones(4, 4)}
    for name in ("another.safetensors", "consolidated.safetensors"):
        save_file(foreign, folder / name)
    if kept == "in parts":
        part = (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(load_file(part), part.name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_fingerprint(folder, dtype="auto") == weights_fingerprint(tiny_model_dir, dtype="auto")


CHANGES = ["seed", "one tensor's end", "one tensor's middle", "type", "shape", "names", "config", "dtype"]


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_have_another_fingerprint(folder: Path, tiny_model_dir: Path, change: str) -> None:
    dtype = "bfloat16" if change == "dtype" else "auto"
    if change == "seed":
        write_tiny_model(folder, seed=1)
    elif change == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    elif change != "dtype":
        tensors = load_file(folder / WEIGHTS)
        name = "model.embed_tokens.weight"
        whole = tensors[name]
        if change == "type":
            # The same bytes.
            tensors[name] = whole.view(torch.int32)
        elif change == "shape":
            tensors[name] = whole.reshape(whole.shape[::-1])
        elif change == "names":
            other = "model.layers.0.mlp.up_proj.weight"
            same = "model.layers.0.mlp.gate_proj.weight"
            tensors[other], tensors[same] = tensors[same], tensors[other]
        elif change == "one tensor's middle":
            whole[len(whole) // 2] += 1
        else:
            whole[-1, -1] += 1
        save_file(tensors, folder / WEIGHTS)
    assert weights_fingerprint(folder, dtype=dtype) != weights_fingerprint(tiny_model_dir, dtype="auto")


def test_a_folder_that_cannot_be_read_says_so(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        weights_fingerprint(folder, dtype="auto")
