"""A data folder, a database or a base model that cannot be opened is told in one line, by every command."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from contracts.base_model import read_base_model_facts
from contracts.errors import InvalidRequest
from engine.model.base import read_model
from store.settings import Settings

COMMANDS = pytest.mark.parametrize("words", [("db", "upgrade"), ("tenant", "create", "cats")])


def refused(*words: str) -> str:
    """Run a command that cannot do its work, and return what it tells: a line, and no traceback."""
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 1, ended.output
    assert isinstance(ended.exception, SystemExit)
    (told,) = [line for line in ended.stderr.splitlines() if line.startswith("weft: ")]
    return told


@COMMANDS
def test_a_data_folder_that_cannot_be_made_is_told_in_a_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("no folder")
    assert "data folder" in refused(*words, "--data", str(tmp_path / "file"))


@COMMANDS
def test_a_file_that_is_no_database_is_told_in_a_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "weft.db").write_text("no database" * 100)
    assert "not a database" in refused(*words, "--data", str(tmp_path))


@COMMANDS
def test_a_database_that_is_not_there_is_told_in_a_line_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("WEFT_DATABASE_URL", "postgresql+asyncpg://weft:swordfish@127.0.0.1:1/weft")
    told = refused(*words, "--data", str(tmp_path))
    assert "refused" in told
    assert "swordfish" not in told


@pytest.mark.parametrize("url", ["weft", "mysql://host/weft", ""])
def test_a_url_of_no_database_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WEFT_DATABASE_URL", url)
    with pytest.raises(ValueError, match="postgresql"):
        Settings()


def test_weights_that_are_cut_short_are_told_by_their_base(tmp_path: Path, tiny_model_dir: Path) -> None:
    for file in tiny_model_dir.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:1000] if file.suffix == ".safetensors" else content)
    with pytest.raises(InvalidRequest, match="'cats' cannot be loaded"):
        read_model(read_base_model_facts("cats", tmp_path, None), dtype="auto")


def test_a_misspelt_variable_is_told_with_the_setting_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WEFT_MAX_RANC", "WEFT_MAX_RANK", "WEFT_LEASE", "WEFT_TEST_SDKS"):
        monkeypatch.setenv(name, "9")
    ended = CliRunner().invoke(app, ["db", "upgrade", "--data", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    told = "weft: WEFT_MAX_RANC is no setting and has no effect; did you mean WEFT_MAX_RANK?"
    assert ended.stderr.splitlines().count(told) == 1
    assert ended.stderr.count("is no setting") == 1
