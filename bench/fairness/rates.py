"""Statistics of the benchmark: Jain's index."""

from collections.abc import Sequence


def jain_index(values: Sequence[float]) -> float:
    """Return Jain's index: 1 when all values are equal, 1/n when one of n has everything (Jain, Chiu and Hawe 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0
