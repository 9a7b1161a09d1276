"""Tables of commands' outcomes: rows under the names of their columns, in colour, on a terminal."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that drive a terminal, begin a line or turn the order of a text; a tab parts the cells of a line."""


def harmless(text: str) -> str:
    """Return a line with its control characters written out: tenants' texts neither drive a terminal nor forge a row."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _cell(text: str) -> str:
    return harmless(text).replace("\t", "\\t")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under the names of their columns. Rows without an end have empty cells there."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def lines(self) -> list[str]:
        """The rows as a pipe gets them."""
        return ["\t".join(map(_cell, row)) for row in self.rows]


def print_tables(tables: Sequence[Table]) -> bool:
    """Print the tables that have rows, and return True, if standard output is a terminal and there are any."""
    filled = [table for table in tables if table.rows]
    if not filled or not sys.stdout.isatty():
        return False
    # Imported late: most commands write to pipes.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=sys.stdout)
    for table in filled:
        drawn = RichTable(box=SIMPLE_HEAD, header_style="bold cyan", pad_edge=False)
        for number, name in enumerate(table.columns):
            drawn.add_column(name, overflow="fold", style="bold" if number == 0 else "")
        for row in table.rows:
            # As text: a name is no markup.
            drawn.add_row(*(Text(_cell(cell)) for cell in row))
        console.print(drawn)
    return True
