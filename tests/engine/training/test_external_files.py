"""External files of adapters on bases that tie their head to their embedding."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pyrage
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from contracts.age_recipients import check_recipients
from contracts.base_model import read_base_model_facts
from contracts.errors import InvalidRequest
from contracts.operations import LoraSettings
from engine.model.adapter_folder import CONFIG, WEIGHTS, read_lora_weights
from engine.model.base import BaseModel
from engine.model.external_files import write_external_files
from engine.model.lora import LoraWeights

COOKBOOK = Path(sys.prefix) / "sdks" / "tinker-cookbook-0.6.1"
HEAD = "base_model.model.model.unembed_tokens.lora_A.weight"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> BaseModel:
    """A base whose head is its embedding, or is not."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=request.param,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "base")
    return BaseModel.load(read_base_model_facts("test/base", tmp_path / "base", None))


def trained(base: BaseModel) -> LoraWeights:
    """Return an adapter on everything with weights unlike zero."""
    settings = LoraSettings(rank=4, seed=1)
    layout = base.layout(settings)
    generator = torch.Generator().manual_seed(5)
    return LoraWeights(settings, layout, torch.randn(layout.size, generator=generator) * 0.05)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The merge planner of tinker-cookbook."""
    if not COOKBOOK.is_dir():
        pytest.fail(f"{COOKBOOK.name} is not unpacked; run `make setup`")
    monkeypatch.syspath_prepend(str(COOKBOOK))
    from tinker_cookbook.weights import _merge

    return _merge


def test_the_cookbooks_merge_planner_takes_every_matrix(base: BaseModel, planner: ModuleType, tmp_path: Path) -> None:
    """The planner finds the head of a tied base by the hosted service's name only, and merges it into the embedding."""
    weights = trained(base)
    write_external_files(tmp_path / "out", base, weights, [])
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    keys = set(load_file(base.facts.path / "model.safetensors"))
    profile = planner.detect_merge_profile(json.loads((base.facts.path / "config.json").read_text()), keys)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    planned = planner.plan_merge_ops(tensors, config, keys, profile)
    assert len(planned) == len(weights.tensors)
    assert ("model.embed_tokens.weight" if base.has_tied_head else "lm_head.weight") in planned
    assert (HEAD in tensors) is base.has_tied_head


def test_weft_reads_its_external_files_back(base: BaseModel, tmp_path: Path) -> None:
    weights = trained(base)
    write_external_files(tmp_path / "out", base, weights, [])
    found = read_lora_weights(tmp_path / "out", base)
    assert (found.layout.key, found.settings.alpha) == (weights.layout.key, weights.settings.alpha)
    assert torch.equal(found.vector, weights.vector)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [CONFIG, WEIGHTS]


def test_sealed_files_leave_nothing_readable_and_open_to_each_recipient(base: BaseModel, tmp_path: Path) -> None:
    mine, theirs, nobody = (pyrage.x25519.Identity.generate() for _ in range(3))
    size = write_external_files(tmp_path / "out", base, trained(base), [str(mine.to_public()), str(theirs.to_public())])
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(files) == [f"{CONFIG}.age", f"{WEIGHTS}.age"]
    assert size == sum(map(len, files.values()))
    for identity in (mine, theirs):
        assert json.loads(pyrage.decrypt(files[f"{CONFIG}.age"], [identity]))["peft_type"] == "LORA"
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(files[f"{WEIGHTS}.age"], [nobody])


@pytest.mark.parametrize(
    "text", ["", "age1", "AGE-SECRET-KEY-1", "ssh-dss AAAA", "ssh-rsa " + "A" * 10_000, "age1\u0000"]
)
def test_what_is_no_recipient_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="age_encryption_recipients"):
        check_recipients([text])


def test_no_recipients_seal_nothing() -> None:
    assert check_recipients(None) is None
    assert check_recipients([]) is None


def test_a_secret_key_that_is_sent_by_mistake_is_not_told_again() -> None:
    """Errors are kept in the database, and operators read them."""
    secret, neighbour = (pyrage.x25519.Identity.generate() for _ in range(2))
    with pytest.raises(InvalidRequest, match="AGE-SECR") as refused:
        check_recipients([str(neighbour.to_public()), str(secret)])
    assert str(secret)[12:] not in refused.value.message
    assert check_recipients([str(neighbour.to_public())]) == [str(neighbour.to_public())]
