"""The commit-msg hook lets good subjects through and names what is wrong with others."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / ".ci" / "commit_message.py"


def _check(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)


def _problems(subject: str) -> list[str]:
    spec = importlib.util.spec_from_file_location("commit_message", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[str] = module.problems(subject)
    return found


@pytest.mark.parametrize(
    "subject",
    [
        "ledger: count attempts",
        "engine/sampling: drop finished routes",
        "api, workers: hand Runtime on whole",
        "docs: say `weft up` once",
        "leases: " + "r" * 10 + " " + "x" * 53,
        "Merge branch 'docs'",
        'Revert "ledger: count attempts"',
        "fixup! ledger: count attempts",
        "squash! ledger: count attempts",
    ],
)
def test_good_subjects_pass(subject: str) -> None:
    assert _problems(subject) == []


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("ledger: " + "count " * 11, "74 characters"),
        ("Let aborts that nobody waits for wait for what somebody does", "area: verb"),
        ("ledger count attempts", "area: verb"),
        ("ledger: Count attempts", "area: verb"),
        ("ledger:count attempts", "area: verb"),
        ("ledger: count", "area: verb"),
        ("ledger: the attempts are counted", "no verb"),
        ("ledger: wip and more", "no verb"),
        ("ledger: count attempts.", "full stop"),
        ("", "area: verb"),
    ],
)
def test_bad_subjects_are_named(subject: str, problem: str) -> None:
    assert any(problem in found for found in _problems(subject)), _problems(subject)


def test_the_hook_reads_the_message_file(tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(
        "# a comment of git\n\nledger: count attempts\n\nSo that a sample ends. The body may say anything.\n"
    )
    assert _check(message).returncode == 0
    message.write_text("Count attempts\n")
    refused = _check(message)
    assert refused.returncode == 1
    assert "area: verb" in refused.stderr
