"""The packages of the house, and their files: what the tests of its rules walk over."""

from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PACKAGES = (
    "api", "bench", "cli", "contracts", "engine", "examples", "ledger", "migrations", "store", "telemetry", "tenants", "testing",
    "workers", "clients",
)  # fmt: skip


def python_files(package: str) -> Iterator[Path]:
    """Every source file of ``package`` that a person wrote."""
    for path in sorted((ROOT / package).rglob("*.py")):
        if not path.name.endswith(("_pb2.py", "admin_models.py")):
            yield path


def place(path: Path, line: int) -> str:
    """A file and line as a reader can open it."""
    return f"{path.relative_to(ROOT)}:{line}"
