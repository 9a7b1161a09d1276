"""Small pieces of Markdown that every generated page uses."""

import re
from collections.abc import Iterable, Sequence

GENERATED = "*Generated from `{source}` by `python -m cli.pages`: change it there.*"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a line for each row; a bar within a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(text) for text in line) + " |\n" for line in lines)


def prose(text: str) -> str:
    """Return a docstring's first paragraph on one line, its double backquotes made single."""
    first = text.strip().split("\n\n")[0]
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(first.split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
