"""External files of adapters on bases that tie their head to their embedding."""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pyrage
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from tinker.cli.commands import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from contracts.age_recipients import check_recipients
from contracts.base_model import read_base_model_facts
from contracts.errors import InvalidRequest
from contracts.operations import LoraSettings
from engine.model.adapter_folder import CONFIG, WEIGHTS, matrices_by_key, read_lora_weights
from engine.model.base import BaseModel
from engine.model.external_files import PEFT_FOLDER, write_external_files
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


def names_in(folder: Path) -> list[str]:
    """Return the files of a folder and of those below it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def expected_names(base: BaseModel) -> list[str]:
    """Return the files of an adapter with the head: a tied one is there by both names."""
    plain = [CONFIG, WEIGHTS]
    return plain + [f"{PEFT_FOLDER}/{name}" for name in plain] if base.has_tied_head else plain


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_peft_loads_every_matrix(base: BaseModel, tmp_path: Path) -> None:
    """PEFT only warns of a head that it does not find, and computes without it."""
    weights = trained(base)
    size = write_external_files(tmp_path / "out", base, weights, [])
    assert size == sum((tmp_path / "out" / name).stat().st_size for name in names_in(tmp_path / "out"))
    plain = AutoModelForCausalLM.from_pretrained(base.facts.path, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "out" / (PEFT_FOLDER if base.has_tied_head else ""))
    found = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    expected = matrices_by_key(weights.layout, weights.vector)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_an_adapter_without_the_head_is_there_once(base: BaseModel, tmp_path: Path) -> None:
    settings = LoraSettings(rank=4, seed=1, train_unembed=False)
    layout = base.layout(settings)
    write_external_files(tmp_path / "out", base, LoraWeights(settings, layout, torch.ones(layout.size)), [])
    assert names_in(tmp_path / "out") == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
def test_both_clients_download_the_folder_within(
    base: BaseModel, planner: ModuleType, tmp_path: Path, is_sealed: bool
) -> None:
    """The cookbook's ``weights.download``, which seals and opens, and ``tinker checkpoint download``."""
    from tinker_cookbook.weights import _download

    identity = pyrage.x25519.Identity.generate()
    write_external_files(tmp_path / "out", base, trained(base), [str(identity.to_public())] if is_sealed else [])
    urls = {name: (tmp_path / "out" / name).as_uri() for name in names_in(tmp_path / "out")}
    answer = SimpleNamespace(urls=urls, expires=datetime.now(UTC) + timedelta(hours=1))
    future = SimpleNamespace(result=lambda: answer)
    client = cast("Any", SimpleNamespace(get_external_weights_urls=lambda _: future))
    key = str(identity) if is_sealed else None
    _download._download_external_weights(client, "tinker://run/external_weights/one", tmp_path / "by", decrypt_key=key)
    assert names_in(tmp_path / "by") == expected_names(base)

    arguments = {"show_progress": False, "format": "json"}
    checkpoint._download_external_weights(client, "tinker://run/external_weights/one", tmp_path / "cli", **arguments)
    assert names_in(tmp_path / "cli") == names_in(tmp_path / "out")


def test_weft_reads_its_external_files_back(base: BaseModel, tmp_path: Path) -> None:
    weights = trained(base)
    write_external_files(tmp_path / "out", base, weights, [])
    found = read_lora_weights(tmp_path / "out", base)
    assert (found.layout.key, found.settings.alpha) == (weights.layout.key, weights.settings.alpha)
    assert torch.equal(found.vector, weights.vector)
    assert names_in(tmp_path / "out") == expected_names(base)


def test_sealed_files_leave_nothing_readable_and_open_to_each_recipient(base: BaseModel, tmp_path: Path) -> None:
    mine, theirs, nobody = (pyrage.x25519.Identity.generate() for _ in range(3))
    size = write_external_files(tmp_path / "out", base, trained(base), [str(mine.to_public()), str(theirs.to_public())])
    files = {name: (tmp_path / "out" / name).read_bytes() for name in names_in(tmp_path / "out")}
    assert list(files) == [f"{name}.age" for name in expected_names(base)]
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
