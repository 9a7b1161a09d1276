"""Database outages: tells a database that is gone, slow or full from an error in a statement."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from contracts.errors import Unavailable

_SQLITE_OUTAGES = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)

_POSTGRES_OUTAGES = ("08", "25006", "25P03", "40", "53", "55P03", "57", "58")
"""Beginnings of the SQLSTATEs of what passes by itself.

In order: a lost connection, a server that only reads, a transaction idle for too long, a deadlock, no room, a lock that is held,
a server that ends or starts, a fault of its machine. Source: PostgreSQL's appendix of error codes.
"""


@contextmanager
def outages_as_unavailable() -> Iterator[None]:
    """Raise ``Unavailable`` in place of the errors by which a driver reports an outage; other errors pass."""
    try:
        yield
    except (DBAPIError, PoolTimeout, OSError) as error:
        if isinstance(error, DBAPIError) and not _is_outage(error):
            raise
        raise Unavailable("the database does not answer; try again in a moment") from error
    except Exception as error:
        # SQLAlchemy does not wrap asyncpg's own errors when a connection cannot be made.
        if type(error).__module__.partition(".")[0] != "asyncpg":
            raise
        raise Unavailable("the database takes no connection; try again in a moment") from error


def _is_outage(error: DBAPIError) -> bool:
    if isinstance(error.orig, sqlite3.Error):
        return (error.orig.sqlite_errorcode & 0xFF) in _SQLITE_OUTAGES
    state = getattr(error.orig, "sqlstate", None) or ""
    return (
        error.connection_invalidated
        or isinstance(error, OperationalError | InterfaceError)
        or state.startswith(_POSTGRES_OUTAGES)
    )
