"""Prints a benchmark's figures: a table, and as the last line the figures as JSON."""

import json
from collections.abc import Mapping
from typing import Any


def rounded(figures: Mapping[str, Any], digits: int = 4) -> dict[str, Any]:
    """Return the figures with at most ``digits`` decimals; values that are no floats stay as they are."""
    return {name: round(value, digits) if isinstance(value, float) else value for name, value in figures.items()}


def print_figures(figures: Mapping[str, float], *, digits: int = 4) -> None:
    """Print a line for each figure, then all figures as one JSON line with at most ``digits`` decimals."""
    for name, value in figures.items():
        print(f"{name:34} {value:12.2f}")
    print(json.dumps(rounded(figures, digits)))
