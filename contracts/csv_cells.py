"""Cells of CSV that no spreadsheet takes for a formula."""

from datetime import datetime
from decimal import Decimal

Cell = datetime | Decimal | float | str | None
_BEGINS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def cell(value: Cell) -> str | float:
    """Return a value for ``csv.writer``: a time in ISO 8601, an absent value empty, a text that is no formula."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, Decimal):
        return f"{value:f}"
    return f"'{value}" if isinstance(value, str) and value.startswith(_BEGINS_A_FORMULA) else value
