"""The page of faults: a row for each fault, and each test that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "explanation" / "faults.md"
ROWS = [*(f"A{number}" for number in range(1, 18)), *(f"B{number}" for number in range(1, 20)), "C", "D"]


def rows() -> dict[str, list[str]]:
    """Return the tests that each row names."""
    found = re.findall(r"^\| ([A-D][0-9]*) \| .+ \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return {row: re.findall(r"`(tests/[^`]+)`", tests) for row, tests in found}


@cache
def functions(path: Path) -> frozenset[str]:
    """Return the names of the file's functions, those of its classes too; none if there is no such file."""
    if not path.exists():
        return frozenset()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


def test_every_fault_has_a_row_with_a_test() -> None:
    named = rows()
    assert list(named) == ROWS
    assert [row for row, tests in named.items() if not tests] == []


def test_every_test_that_a_row_names_is_there() -> None:
    named = [test for tests in rows().values() for test in tests]
    gone = [test for test in named if test.partition("::")[2] not in functions(ROOT / test.partition("::")[0])]
    assert gone == []
