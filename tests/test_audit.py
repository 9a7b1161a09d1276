"""``make check`` fails on a known vulnerability, and not because nobody could be asked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CLEAN = {"dependencies": [{"name": "idna", "version": "3.10", "vulns": []}, {"name": "torch", "skip_reason": "local"}]}
FLAWED = {"dependencies": [{"name": "idna", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.7"]}]}]}


@pytest.mark.parametrize(
    ("printed", "status", "told"),
    [
        (json.dumps(CLEAN), 0, "torch: local"),
        (json.dumps(FLAWED), 1, "idna 1: PYSEC-1, fixed in 3.7"),
        ("Traceback: no route to host", 0, "nobody could be asked"),
        (None, 0, "nobody could be asked"),
    ],
)
def test_only_a_finding_fails(tmp_path: Path, printed: str | None, status: int, told: str) -> None:
    asked = tmp_path / "pip-audit"
    if printed is not None:
        asked.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit 1\n")
        asked.chmod(0o755)
    ended = subprocess.run([sys.executable, ROOT / ".ci" / "audit.py", asked], capture_output=True, text=True)
    assert (ended.returncode, told in ended.stderr) == (status, True)
