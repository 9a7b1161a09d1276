"""A tokenizer's id tells of the server's disk to clients that share it only."""

from pathlib import Path

import pytest

from cli.base_models import read_base_models
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
