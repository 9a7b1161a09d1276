"""The one place that reads the wall clock; passed in, so that tests can move it."""

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""Returns the current aware UTC time."""


def utc_now() -> datetime:
    """The system's time, aware, in UTC."""
    return datetime.now(UTC)
