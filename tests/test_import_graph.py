"""Imports between files: no circle anywhere, and the API starts light."""

import graphlib
import subprocess
import sys

import grimp
import pytest

from tests.conftest import ROOT
from tests.house import PACKAGES

HEAVY = ("torch", "peft", "transformers", "vllm")


def test_no_file_imports_itself_by_a_circle() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as circle:
        raise AssertionError(" imported by ".join(circle.args[1])) from None


def test_importing_the_api_leaves_torch_out() -> None:
    """Every module of ``api``, in a fresh interpreter."""
    program = (
        "import importlib, pkgutil, sys, api\n"
        "for module in pkgutil.walk_packages(api.__path__, 'api.'): importlib.import_module(module.name)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["cli.api", "cli.beat", "cli.pool", "cli.up"])
def test_commands_that_compute_nothing_leave_torch_out(command: str) -> None:
    """A pool that samples on vLLM computes nothing itself; loading torch takes seconds and memory of each process."""
    program = f"import sys, {command}; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_import_rules_hold() -> None:
    linter = f"{sys.prefix}/bin/lint-imports"
    finished = subprocess.run([linter], capture_output=True, text=True, cwd=ROOT)
    assert finished.returncode == 0, finished.stdout
