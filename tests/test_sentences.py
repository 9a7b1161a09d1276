"""The house's sentences: a docstring begins with a verb or the thing, and it names the thing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import PACKAGES, place, python_files

PRONOUNS = re.compile(
    r"(What|Whatever|Who|Whoever|Whose|Whom|Those|These|This|They|Them|It|Its|Itself|Of|That|Where|Which|How|Whether|When|Why|"
    r"He|She|His|Her|Himself|Such|Some|Somebody|Nobody|Anybody|Everybody|All of (it|them)|None of|One of|As|By|For|From|In|On|To|"
    r"With|Until|Unless|Since|Because|Also|And|But|Or|So|Then|There|Here|Only|Not)\b"
)
"""Words that point away from the thing. A sentence that begins with one must be read twice."""
NAMED = re.compile(r"(For example|In-process|To be)\b")


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring; a string under an attribute counts as one."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, documented):
            for line in node.body:
                if (
                    isinstance(line, ast.Expr)
                    and isinstance(line.value, ast.Constant)
                    and isinstance(line.value.value, str)
                ):
                    yield line.lineno, line.value.value.strip()


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_every_docstring_begins_with_a_verb_or_the_thing(package: str) -> None:
    found = [
        f"{place(path, line)} {text.splitlines()[0]}"
        for path in python_files(package)
        for line, text in _docstrings(path)
        if PRONOUNS.match(text) and not NAMED.match(text)
    ]
    assert found == [], f"{len(found)} docstrings point instead of naming:\n" + "\n".join(found)
