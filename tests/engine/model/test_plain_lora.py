"""An adapter of PEFT's is taken only if it computes the same here as where PEFT loads it onto the base."""

import json
import typing
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from contracts.base_model import read_base_model_facts
from contracts.errors import InvalidRequest
from engine.model.adapter_folder import CONFIG, read_lora_weights, read_matrices
from engine.model.adapter_import import ImportBounds, import_adapter
from engine.model.base import BaseModel
from engine.model.lora import AdapterSegment
from engine.model.plain_lora import HARMLESS, PLAIN_INITS, check_config

BOUNDS = ImportBounds(most_bytes=20 * 2**20, max_rank=16)
TOLERANCE = 5e-5
MINIMAL = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
PEFT_0_2 = {
    "base_model_name_or_path": "some/base",
    "bias": "none",
    "enable_lora": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "merge_weights": False,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 8,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
PEFT_0_6 = {
    "alpha_pattern": {},
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama"},
    "base_model_name_or_path": "some/base",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": [0, 1],
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 8,
    "rank_pattern": {},
    "revision": "main",
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
    "use_rslora": False,
}
NEEDS_DATA = ("corda", "loftq", "pissa_niter_[number of iters]")
"""Beginnings that need data, or more packages, and one that is no value as it stands."""


def named_inits() -> list[str]:
    """All named beginnings of the pinned PEFT, as its config types them."""
    kinds = typing.get_type_hints(LoraConfig)["init_lora_weights"]
    literal = next(kind for kind in typing.get_args(kinds) if typing.get_origin(kind) is typing.Literal)
    return [str(name) for name in typing.get_args(literal)]


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> BaseModel:
    """The tiny base."""
    return BaseModel.load(read_base_model_facts("weft/tiny", tiny_model_dir, None))


@pytest.fixture(autouse=True)
def _quiet() -> typing.Iterator[None]:
    """PEFT warns of most of what is tried here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(folder: Path, **options: typing.Any) -> PeftModel:
    """An adapter of PEFT's, changed as by a training."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], **options)
    made: PeftModel = get_peft_model(model, config)
    return made


def train(model: PeftModel) -> None:
    """Change the matrices."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)


def check_same(base: BaseModel, adapter: Path, work: Path) -> None:
    """Import the adapter beside another and a bare row: it computes what PEFT computes that loads it."""
    work.mkdir()
    mine = import_adapter(adapter, work, base, BOUNDS)
    other = read_lora_weights(adapter, base, "cpu")
    other.vector.mul_(2.0)
    tokens = torch.randint(0, 300, (3, 9), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base.facts.path, dtype=torch.float32)
        expected = PeftModel.from_pretrained(plain, adapter).eval()(tokens, use_cache=False).logits
        bare = base.logits(tokens)
        with base.adapters([AdapterSegment(mine, 0, 1), AdapterSegment(other, 1, 2)]):
            found = base.logits(tokens)
    torch.testing.assert_close(found[0], expected[0], atol=TOLERANCE, rtol=TOLERANCE)
    assert (expected[0] - bare[0]).abs().max() > 0.05
    torch.testing.assert_close(found[2], bare[2])


@pytest.mark.parametrize(
    "begun", [True, False, "pissa_niter_4", *sorted(set(named_inits()) - set(NEEDS_DATA))], ids=str
)
def test_every_beginning_is_computed_as_peft_does_or_refused(
    begun: bool | str, base: BaseModel, tmp_path: Path
) -> None:
    model = trained(base.facts.path, init_lora_weights=begun)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    if isinstance(begun, bool) or begun in PLAIN_INITS:
        check_same(base, tmp_path / "adapter", tmp_path / "work")
        return
    (tmp_path / "work").mkdir()
    with pytest.raises(InvalidRequest, match=r"init_lora_weights is .* path_initial_model_for_weight_conversion"):
        import_adapter(tmp_path / "adapter", tmp_path / "work", base, BOUNDS)
    with pytest.raises(InvalidRequest, match="init_lora_weights"):
        read_matrices(tmp_path / "adapter")


@pytest.mark.parametrize("begun", ["pissa", "olora"])
def test_an_adapter_that_was_converted_as_the_error_says_is_taken(begun: str, base: BaseModel, tmp_path: Path) -> None:
    model = trained(base.facts.path, init_lora_weights=begun)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = begun
    train(model)
    model.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    check_same(base, tmp_path / "adapter", tmp_path / "work")


def test_an_activated_adapter_is_refused(base: BaseModel, tmp_path: Path) -> None:
    """The matrices look like those of plain LoRA, and count from a place in the sequence on."""
    model = trained(base.facts.path, alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "work").mkdir()
    with pytest.raises(InvalidRequest, match=r"alora_invocation_tokens.*train one without it"):
        import_adapter(tmp_path / "adapter", tmp_path / "work", base, BOUNDS)


@pytest.mark.parametrize("name", sorted({one.name for one in fields(LoraConfig)} - HARMLESS | {"no_such_setting"}))
def test_every_other_setting_is_refused_by_name_once_it_is_set(name: str) -> None:
    for off in (None, False, {}, [], ""):
        check_config({**MINIMAL, name: off})
    for on in (True, {"some": 1}, [1], "some"):
        with pytest.raises(InvalidRequest, match=f"the adapter uses {name}, .* train one without it"):
            check_config({**MINIMAL, name: on})


@pytest.mark.parametrize("begun", ["pissa", "corda", "loftq", "lora_ga", "something new", 3, ["gaussian"], {}], ids=str)
def test_beginnings_that_are_not_known_are_refused(begun: object) -> None:
    with pytest.raises(InvalidRequest, match="init_lora_weights"):
        check_config({**MINIMAL, "init_lora_weights": begun})


@pytest.mark.parametrize("config", [MINIMAL, PEFT_0_2, PEFT_0_6, {**MINIMAL, "init_lora_weights": None}])
def test_what_older_versions_and_hands_wrote_is_taken(config: dict[str, object]) -> None:
    check_config(config)


def test_what_the_pinned_peft_writes_by_default_is_taken(tmp_path: Path) -> None:
    LoraConfig().save_pretrained(tmp_path)
    check_config(json.loads((tmp_path / CONFIG).read_text()))
