"""Whether the database can be read and would be written now, asked so that the event loop does not stand still meanwhile."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import make_url

from store.database import Database

_REVISION = "SELECT version_num FROM alembic_version"
_STATE = f"SELECT ({_REVISION}), pg_is_in_recovery(), current_setting('transaction_read_only') = 'on'"


class TakesNoWrites(Exception):
    """The database answers, but only reads. Says why, in words for anybody."""


async def schema_revision(database: Database, *, seconds: float) -> str | None:
    """The schema's revision, None for an empty database.

    SQLite is asked for its writer, within about ``seconds``; PostgreSQL says whether it is a standby or set to read only, and
    is not written to: a full disk shows in what fails, not here. Raises ``TakesNoWrites``, ``sqlite3.Error`` or SQLAlchemy's
    errors, ``Unavailable``.
    """
    url = make_url(database.engine.url)
    if url.get_backend_name() == "sqlite" and url.database is not None:
        return await asyncio.to_thread(_sqlite_revision, Path(url.database), seconds)
    async with database.read() as session:
        revision, is_standby, only_reads = (await session.execute(text(_STATE))).one()
    if is_standby:
        raise TakesNoWrites("the database is a standby, which takes no writes")
    if only_reads:
        raise TakesNoWrites("the database is set to read only")
    return None if revision is None else str(revision)


def _sqlite_revision(path: Path, seconds: float) -> str | None:
    """By a connection of its own: the service's own would wait on the event loop, and still see a file that is gone."""
    uri = f"{path.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        row = connection.execute(_REVISION).fetchone()
        connection.execute("ROLLBACK")
    return None if row is None else str(row[0])
