"""The shape of the code: short files, narrow constructors, few broad excepts."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import PACKAGES, place, python_files

LONGEST_FILE = 420
WIDEST_CONSTRUCTOR = 8
BROAD_EXCEPTS_IN_WORKERS = 16
_BROAD = {"Exception", "BaseException"}


@pytest.mark.parametrize("package", PACKAGES)
def test_files_stay_short(package: str) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in python_files(package)}
    assert {place(path, count) for path, count in lines.items() if count > LONGEST_FILE} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_constructor_is_wider_than_eight_parameters(package: str) -> None:
    wide = {
        place(path, node.lineno) for path in python_files(package) for node in _constructors(path) if _is_wide(node)
    }
    assert wide == set()


def test_broad_excepts_of_the_workers_stay_at_the_edges() -> None:
    """The one of every periodic loop is ``store.repeat``'s."""
    broad = [place(path, node.lineno) for path in python_files("workers") for node in _nodes(path) if _is_broad(node)]
    assert len(broad) <= BROAD_EXCEPTS_IN_WORKERS, broad


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def _constructors(path: Path) -> Iterator[ast.FunctionDef]:
    for node in _nodes(path):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield node


def _is_wide(constructor: ast.FunctionDef) -> bool:
    given = constructor.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1 > WIDEST_CONSTRUCTOR


def _is_broad(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in _BROAD) for kind in kinds)
