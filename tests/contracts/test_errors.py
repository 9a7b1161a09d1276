"""The error tree drawn in ``contracts/errors.py`` is the code's."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from contracts import errors
from contracts.errors import WeftError

PACKAGES = ("api", "cli", "contracts", "engine", "ledger", "migrations", "store", "telemetry", "tenants", "workers")
NODE = re.compile(
    r"^    (?P<branch>(?:│   |    )*(?:[├└]── )?)(?P<name>[A-Z]\w+)(?: +(?P<first>[\w.]+) +(?P<second>\w+))?"
)


@dataclass(frozen=True)
class Node:
    """A line of the tree: the class, its parent, and the two columns after it."""

    name: str
    parent: str | None
    first: str
    second: str


def _drawn() -> Iterator[Node]:
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := NODE.match(line):
            depth = len(found["branch"]) // 4
            path[depth:] = [found["name"]]
            yield Node(found["name"], path[depth - 1] if depth else None, found["first"] or "", found["second"] or "")


def _descendants(root: type[BaseException]) -> Iterator[type[BaseException]]:
    for child in root.__subclasses__():
        yield child
        yield from _descendants(child)


def _is_ours(error: type[BaseException]) -> bool:
    return error.__module__.partition(".")[0] in PACKAGES


@pytest.fixture(scope="module")
def classes() -> set[type[BaseException]]:
    """Every error class of production code, after all of it has been imported."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if module.name != "migrations.env" and not module.name.startswith("migrations.versions."):
                importlib.import_module(module.name)
    return {one for one in _descendants(BaseException) if _is_ours(one)}


def test_every_answer_is_drawn_with_its_parent_status_and_code(classes: set[type[BaseException]]) -> None:
    drawn = {(one.name, one.parent, one.first, one.second) for one in _drawn() if one.first.isdigit()}
    found = {
        (one.__name__, one.__base__.__name__ if one is not WeftError else None, str(one.status), one.code)
        for one in classes
        if issubclass(one, WeftError) and one.__base__ is not None
    }
    assert drawn == found


def test_every_other_error_is_drawn_with_its_parent_and_module(classes: set[type[BaseException]]) -> None:
    drawn = {(one.name, one.parent, one.first) for one in _drawn() if one.parent and not one.first.isdigit()}
    found = {
        (one.__name__, one.__base__.__name__, one.__module__)
        for one in classes
        if not issubclass(one, WeftError) and one.__base__ is not None
    }
    assert drawn == found
