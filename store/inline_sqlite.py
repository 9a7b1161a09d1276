"""SQLite statements on the event loop's own thread.

aiosqlite hands every statement to a thread and back. A statement takes tens of microseconds, the two hand-overs several times
that. While a trainer's thread computes, each hand-over takes up to the interpreter's switch interval. This connection runs
statements in the calling thread. SQLAlchemy sees an ordinary aiosqlite connection (decision 6).
"""

import sqlite3
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import aiosqlite

T = TypeVar("T")

_FETCH_ROWS = 64


class InlineConnection(aiosqlite.Connection):
    """An aiosqlite connection without its thread. Await it to connect."""

    def __init__(self, path: str, *, busy_seconds: float) -> None:
        def connect() -> sqlite3.Connection:
            return sqlite3.connect(path, timeout=busy_seconds, check_same_thread=False)

        super().__init__(connect, _FETCH_ROWS)

    def __await__(self) -> Generator[Any, None, "InlineConnection"]:
        return self._open().__await__()

    async def _open(self) -> "InlineConnection":
        if self._connection is None:
            self._connection = self._connector()
        return self

    async def _execute(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._connection is None:
            raise ValueError("Connection closed")
        return fn(*args, **kwargs)

    async def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self.stop()

    def stop(self) -> None:
        """Close the connection at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
