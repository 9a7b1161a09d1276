"""SQLite statements on the event loop's own thread.

aiosqlite, SQLAlchemy's usual way, hands every statement to a thread and back. A statement takes tens of microseconds, the two
hand-overs several times that. While a trainer's thread computes, each hand-over takes up to the interpreter's switch interval.
This dialect uses Python's own ``sqlite3`` and runs each statement where it is called (decision 6).
"""

import sqlite3
from collections import deque
from typing import Any

from sqlalchemy import NullPool
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import URL

_DRIVER = "inline"


class InlineCursor(sqlite3.Cursor):
    """A cursor that has read all rows when ``execute`` returns.

    A statement that stays open would keep its snapshot of the database while other tasks run.
    """

    _rows: deque[Any]

    def execute(self, *args: Any) -> "InlineCursor":
        """Run the statement and read its rows."""
        super().execute(*args)
        self._rows = deque(super().fetchall() if self.description is not None else ())
        return self

    def fetchone(self) -> Any:
        """Return the next row, or None after the last one."""
        return self._rows.popleft() if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[Any]:
        """Return the next ``size`` rows, ``arraysize`` by default, or those that are left."""
        most = self.arraysize if size is None else size
        return [self._rows.popleft() for _ in range(min(most, len(self._rows)))]

    def fetchall(self) -> list[Any]:
        """Return the rows that are left."""
        rows, self._rows = list(self._rows), deque()
        return rows

    async def _async_soft_close(self) -> None:
        """Do nothing: SQLAlchemy's async session calls this once the rows are read."""


class InlineConnection(sqlite3.Connection):
    """A connection whose cursors are ``InlineCursor``."""

    def cursor(self, factory: Any = InlineCursor) -> Any:
        """Return a new cursor."""
        return super().cursor(factory)


class InlineDialect(SQLiteDialect_pysqlite):
    """SQLAlchemy's dialect of ``sqlite3``, for async engines. Its statements never wait for the event loop."""

    driver = _DRIVER
    is_async = True
    supports_statement_cache = True

    @classmethod
    def get_pool_class(cls, _url: URL) -> type[NullPool]:
        """Return no pool: ``Database`` keeps its two connections."""
        return NullPool


def inline_url(url: URL) -> URL:
    """Return the SQLite ``url``, whatever driver it names, for an engine with this dialect."""
    registry.register(f"sqlite.{_DRIVER}", __name__, InlineDialect.__name__)
    return url.set(drivername=f"sqlite+{_DRIVER}")
