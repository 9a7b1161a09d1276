"""The house rules that no linter knows: light imports, small files, docs that are true to the code."""

import subprocess
import sys
from pathlib import Path

import pytest

from cli.settings_page import render
from tests.conftest import ROOT

LONGEST_FILE = 450
HEAVY = ("torch", "peft", "transformers", "vllm")


def test_importing_the_api_leaves_torch_out() -> None:
    """Every module of ``api``, in a fresh interpreter."""
    program = (
        "import importlib, pkgutil, sys, api\n"
        "for module in pkgutil.walk_packages(api.__path__, 'api.'): importlib.import_module(module.name)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "package",
    [
        "api",
        "cli",
        "contracts",
        "engine",
        "ledger",
        "migrations",
        "store",
        "telemetry",
        "tenants",
        "workers",
        "bench",
        "testing",
    ],
)
def test_files_stay_small(package: str) -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / package).rglob("*.py")
        if not path.name.endswith("_pb2.py") and (lines := len(path.read_text().splitlines())) > LONGEST_FILE
    }
    assert long == {}


def test_configuration_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "configuration.md"
    assert page.read_text() == render(), "run: .venv/bin/python -m cli.settings_page"


def test_import_rules_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    finished = subprocess.run([linter], capture_output=True, text=True, cwd=ROOT)
    assert finished.returncode == 0, finished.stdout
