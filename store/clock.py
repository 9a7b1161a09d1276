"""The wall clock. It is passed to whatever needs the time, so that tests can move it."""

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""Returns the current aware UTC time."""


def utc_now() -> datetime:
    """Return the system's time as an aware UTC datetime."""
    return datetime.now(UTC)
