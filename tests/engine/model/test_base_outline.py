"""A base without its weights reads and writes the same adapters as the base itself. It knows the base's head by a digest."""

import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from contracts.base_model import read_base_model_facts
from contracts.errors import InvalidRequest
from engine.model.adapter_folder import WEIGHTS
from engine.model.adapter_import import ImportBounds, import_adapter, write_imported
from engine.model.base import BaseModel
from engine.model.base_outline import AdapterBase
from engine.model.skeleton import read_names

HEAD = "base_model.model.lm_head.base_layer.weight"


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> BaseModel:
    """The tiny base."""
    return BaseModel.load(read_base_model_facts("weft/tiny", tiny_model_dir, None))


@pytest.fixture
def adapter(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A folder as PEFT writes it, of an adapter on the head, along with the frozen head itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
        made: PeftModel = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["lm_head", "q_proj"]))
        made.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert HEAD in load_file(tmp_path / "adapter" / WEIGHTS)
    return tmp_path / "adapter"


def imported(adapter: Path, base: AdapterBase, out: Path) -> dict[str, bytes]:
    """The files of the checkpoint that an import makes."""
    work = out.with_name(f"{out.name}-work")
    work.mkdir()
    write_imported(out, base, import_adapter(adapter, work, base, ImportBounds(2**30, 16)))
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_an_import_without_the_bases_weights_is_the_same(base: BaseModel, adapter: Path, tmp_path: Path) -> None:
    assert imported(adapter, base.outline, tmp_path / "a") == imported(adapter, base, tmp_path / "b")


def test_another_head_beside_an_adapter_is_refused(base: BaseModel, adapter: Path, tmp_path: Path) -> None:
    """The adapter was trained on a head that is not the base's."""
    tensors = load_file(adapter / WEIGHTS)
    tensors[HEAD][0, 0] += 1
    save_file(tensors, adapter / WEIGHTS)
    for number, one in enumerate((base, base.outline)):
        with pytest.raises(InvalidRequest, match="it holds base_model"):
            imported(adapter, one, tmp_path / str(number))


def test_a_loaded_base_has_the_names_of_its_folder(base: BaseModel) -> None:
    assert base.names == read_names(base.facts.path)
