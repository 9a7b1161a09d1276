"""A mistyped data folder gets no database: only the service's processes and ``weft db upgrade`` make one."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app

DAY = "2027-01-01"
COMMANDS = [
    "tenant list",
    "key create --tenant cats",
    "top --once",
    "audit verify",
    f"usage export --since {DAY}",
    "operator create",
    "operator list",
    "ui open tml-0123456789ab",
    "checkpoint import . --tenant cats --base-model cats=.",
    "checkpoint merge tinker://run/weights/one out --base .",
    "housekeeping run",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder; the environment names no data folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("WEFT_DATA_DIR", "WEFT_DATABASE_URL", "WEFT_ADMIN_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def weft(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_no_database_is_wrong_usage_and_leaves_nothing_behind(place: Path, command: str) -> None:
    for words, folder in ((["--data", "typo"], "typo"), ([], ".weft")):
        ended = weft(*command.split(), *words)
        assert (ended.exit_code, ended.stdout) == (2, ""), ended.output
        assert f"weft: no database in {place / folder}: pass --data, or set WEFT_DATA_DIR;" in ended.stderr
    assert list(place.iterdir()) == []


def test_a_tenant_may_be_made_before_the_first_start_only_where_the_folder_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unnamed = weft("tenant", "create", "cats")
    assert (unnamed.exit_code, list(place.iterdir())) == (2, []), unnamed.output
    assert weft("tenant", "create", "cats", "--data", "named").stdout.startswith("tml-")
    monkeypatch.setenv("WEFT_DATA_DIR", "exported")
    assert weft("tenant", "create", "cats").stdout.startswith("tml-")
    monkeypatch.setenv("WEFT_DATABASE_URL", f"sqlite+aiosqlite:///{place}/exported/other.db")
    absent = weft("tenant", "list")
    assert (absent.exit_code, "no database at" in absent.stderr, "WEFT_DATABASE_URL" in absent.stderr) == (
        2,
        True,
        True,
    )
    assert weft("tenant", "create", "cats").stdout.startswith("tml-")


def test_the_data_folder_that_the_environment_names_is_that_of_every_command(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_DATA_DIR", "exported")
    assert weft("db", "upgrade").exit_code == 0
    ended = weft("tenant", "create", "cats")
    assert ended.exit_code == 0, ended.output
    assert weft("tenant", "list").stdout.startswith("cats\t")
    assert weft("tenant", "list", "--data", ".weft").exit_code == 2
    assert [entry.name for entry in place.iterdir()] == ["exported"]
