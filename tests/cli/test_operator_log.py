"""Operators' commands on the database are in the security log's file, with who ran them and without secrets."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from logging import makeLogRecord
from pathlib import Path
from typing import Any

import pytest

from cli import operator_log
from telemetry.security_file import MONTHS_KEPT, SECURITY_FOLDER, MonthlyFiles


def weft(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *arguments, "--data", str(data)]
    return subprocess.run(command, capture_output=True, text=True)


def events(data: Path) -> list[dict[str, Any]]:
    (file,) = (data / SECURITY_FOLDER).iterdir()
    return [json.loads(line)["security"] for line in file.read_text().splitlines()]


def test_commands_are_noted_with_who_ran_them_and_no_secret(tmp_path: Path) -> None:
    data = tmp_path / "data"
    key = weft(data, "tenant", "create", "cats").stdout.strip()
    assert weft(data, "key", "revoke", key).returncode == 0
    assert weft(data, "key", "create", "--tenant", "nobody").returncode != 0
    noted = events(data)
    assert [(line["event"], line["outcome"]) for line in noted] == [
        ("tenant_created", "done"),
        ("key_created", "done"),
        ("operator_command", "done"),
        ("key_revoked", "done"),
        ("operator_command", "done"),
        ("operator_command", "refused"),
    ]
    assert {line["actor"] for line in noted} == {operator_log.operator()}
    assert noted[3]["resource"] == key[:16]
    assert noted[4]["resource"].startswith(f"weft key revoke {key[:16]}-…")
    (file,) = (data / SECURITY_FOLDER).iterdir()
    assert key[17:] not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


def test_a_file_that_is_older_than_a_year_is_removed(tmp_path: Path) -> None:
    for year in (2024, 2025):
        for month in range(1, 13):
            (tmp_path / f"security-me-{year}-{month:02}.jsonl").touch()
    (tmp_path / "security-other-2020-01.jsonl").touch()
    moment = datetime(2026, 1, 15, tzinfo=UTC).timestamp()
    MonthlyFiles(tmp_path, "cli", "me").emit(
        makeLogRecord({"created": moment, "msg": "hello", "name": "weft.security", "levelname": "INFO"})
    )
    kept = sorted(path.name for path in tmp_path.glob("security-me-*"))
    assert len(kept) == MONTHS_KEPT
    assert (kept[0], kept[-1]) == ("security-me-2025-01.jsonl", "security-me-2026-01.jsonl")
    assert (tmp_path / "security-other-2020-01.jsonl").exists()


@pytest.mark.parametrize("error", [KeyError("no such uid"), OSError("no name")])
def test_an_operator_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def nameless() -> str:
        raise error

    monkeypatch.setattr(operator_log.getpass, "getuser", nameless)
    assert operator_log.operator().startswith("uid-")
