"""Settings come from options, the environment and one file, in this order."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from store.settings import Settings


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to start in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_in_the_folder_is_read(here: Path) -> None:
    (here / "weft.toml").write_text('max_rank = 16\nlease = "PT9S"\nbase_models = ["a=models/a"]\n')
    settings = Settings()
    assert (settings.max_rank, settings.lease.total_seconds(), settings.base_models) == (16, 9.0, ("a=models/a",))


def test_options_come_before_the_environment_before_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "weft.toml").write_text("max_rank = 16\nmax_datums = 16\nport = 1016\n")
    monkeypatch.setenv("WEFT_MAX_RANK", "32")
    monkeypatch.setenv("WEFT_PORT", "1032")
    settings = Settings(port=1064)
    assert (settings.max_datums, settings.max_rank, settings.port) == (16, 32, 1064)


def test_another_file_can_be_named_and_must_be_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "other.toml").write_text("max_rank = 8\n")
    monkeypatch.setenv("WEFT_CONFIG", str(here / "other.toml"))
    assert Settings().max_rank == 8
    monkeypatch.setenv("WEFT_CONFIG", str(here / "nothing.toml"))
    with pytest.raises(FileNotFoundError, match=r"nothing\.toml"):
        Settings()


def test_a_setting_that_is_not_one_is_refused_by_name(here: Path) -> None:
    (here / "weft.toml").write_text("max_ranc = 16\n")
    with pytest.raises(ValidationError, match="max_ranc"):
        Settings()


@pytest.mark.parametrize(("given", "seconds"), [("10", 10.0), ("0.5", 0.5), ("PT9S", 9.0)])
def test_a_duration_is_read_from_the_environment_in_seconds_or_iso_8601(
    here: Path, monkeypatch: pytest.MonkeyPatch, given: str, seconds: float
) -> None:
    assert not (here / "weft.toml").exists()
    monkeypatch.setenv("WEFT_LEASE", given)
    monkeypatch.setenv("WEFT_RETENTION_RUNS", given)
    settings = Settings()
    assert (settings.lease.total_seconds(), settings.retention_runs.total_seconds()) == (seconds, seconds)
