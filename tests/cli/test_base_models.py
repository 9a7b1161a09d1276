"""Facts of bases: a tokenizer's id tells of the server's disk to clients that share it only."""

import json
from pathlib import Path

import pytest

from cli.base_models import read_base_models
from contracts.errors import InvalidRequest
from store.settings import Settings

PASSED_ON = {
    "a public address": {"public_url": "https://weft.example"},
    "the end of a tunnel": {"public_url": "http://localhost:8642"},
    "a trusted host": {"trusted_hosts": ("weft.example",)},
    "a trusted proxy": {"trusted_proxies": ("127.0.0.1/32",)},
    "another interface": {"host": "0.0.0.0"},
}


def told(folder: Path, name: str, **settings: object) -> str | None:
    """Return the tokenizer's id that training clients get."""
    given = Settings.model_validate({"base_models": (f"{name}={folder}",), **settings})
    return read_base_models(given)[name].tokenizer_id


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_clients_of_the_servers_own_machine_are_told_the_models_folder(tiny_model_dir: Path, host: str) -> None:
    assert told(tiny_model_dir, "org/cats", host=host) == str(tiny_model_dir)


@pytest.mark.parametrize("settings", PASSED_ON.values(), ids=PASSED_ON)
def test_clients_of_other_machines_make_the_id_from_the_name(tiny_model_dir: Path, settings: dict[str, object]) -> None:
    """A proxy or a tunnel ends on loopback, too. Its clients have no such folder, and a tenant is told no path."""
    assert told(tiny_model_dir, "org/cats", **settings) is None


def test_a_base_that_is_named_by_a_path_keeps_it(tiny_model_dir: Path) -> None:
    assert told(tiny_model_dir, "/models/cats", public_url="https://weft.example") == "/models/cats"


def test_what_a_config_leaves_out_is_its_classs(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Gemma 3 as it is published: ``text_config`` tells only what differs from the class."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = Settings.model_validate({"base_models": (f"org/gemma={tmp_path}", f"org/tiny={tiny_model_dir}")})
    gemma, tiny = (read_base_models(given)[name] for name in ("org/gemma", "org/tiny"))
    assert (gemma.context_length, gemma.vocabulary_size) == (131_072, 262_208)
    own = json.loads((tiny_model_dir / "config.json").read_text())
    assert (tiny.context_length, tiny.vocabulary_size) == (own["max_position_embeddings"], own["vocab_size"])


@pytest.mark.parametrize("model_type", [None, "none such"])
def test_a_config_of_no_known_class_must_tell_its_context(tmp_path: Path, model_type: str | None) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 9} | ({"model_type": model_type} if model_type else {}))
    )
    with pytest.raises(InvalidRequest, match="gives no context length"):
        read_base_models(Settings.model_validate({"base_models": (f"org/cats={folder}",)}))
