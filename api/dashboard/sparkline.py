"""Paths of sparklines: a few values as lines of a small SVG drawing."""

from collections.abc import Sequence

WIDTH, HEIGHT = 120, 28
_MARGIN = 2.0


def spark_path(values: Sequence[float | None]) -> str:
    """Return the ``d`` of a path through the values; it is broken where a value is None. Empty without two values."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    rise = (HEIGHT - 2 * _MARGIN) / ((high - low) or 1.0)
    step = (WIDTH - 2 * _MARGIN) / max(len(values) - 1, 1)
    parts, is_drawing = [], False
    for place, value in enumerate(values):
        if value is not None:
            y = HEIGHT - _MARGIN - (value - low) * rise
            parts.append(f"{'L' if is_drawing else 'M'}{_MARGIN + place * step:.1f} {y:.1f}")
        is_drawing = value is not None
    return "".join(parts)
