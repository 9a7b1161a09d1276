"""Health check of the database: can it be read, and does it take writes? The check never blocks the event loop."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import make_url

from store.database import Database

_REVISION = "SELECT version_num FROM alembic_version"
_POSTGRES_STATE = f"SELECT ({_REVISION}), pg_is_in_recovery(), current_setting('transaction_read_only') = 'on'"


class TakesNoWrites(Exception):
    """The database answers but takes no writes. The message is safe to show to anybody."""


async def check_health(database: Database, *, seconds: float) -> str | None:
    """Check that the database takes writes. Return its schema's Alembic revision, or None for an empty database.

    SQLite: take the write lock, waiting about ``seconds``. PostgreSQL: ask whether it is a standby or read-only; nothing is
    written, so a full disk is not noticed here. Raises ``TakesNoWrites``, ``Unavailable``, ``sqlite3.Error`` or
    SQLAlchemy's errors.
    """
    url = make_url(database.engine.url)
    if url.get_backend_name() == "sqlite" and url.database is not None:
        return await asyncio.to_thread(_sqlite_revision, Path(url.database), seconds)
    async with database.read() as session:
        revision, is_standby, only_reads = (await session.execute(text(_POSTGRES_STATE))).one()
    if is_standby:
        raise TakesNoWrites("the database is a standby, which takes no writes")
    if only_reads:
        raise TakesNoWrites("the database is set to read only")
    return None if revision is None else str(revision)


def _sqlite_revision(path: Path, seconds: float) -> str | None:
    """Read the revision over a new connection. The service's own would block the event loop and miss a deleted file."""
    uri = f"{path.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        row = connection.execute(_REVISION).fetchone()
        connection.execute("ROLLBACK")
    return None if row is None else str(row[0])
