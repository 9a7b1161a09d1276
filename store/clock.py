"""The wall clock: a function that is passed to every part that needs the time, so that tests can replace it."""

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""Returns the current aware UTC time."""


def utc_now() -> datetime:
    """Return the system's time as an aware UTC datetime."""
    return datetime.now(UTC)
