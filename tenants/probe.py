"""Whether the database can be read and written now, asked so that the event loop does not stand still meanwhile."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import make_url

from tenants.database import Database

_REVISION = "SELECT version_num FROM alembic_version"


async def schema_revision(database: Database, *, seconds: float) -> str | None:
    """The schema's revision, None for an empty database; proof that the database takes writes now.

    Raises ``sqlite3.Error`` or SQLAlchemy's errors when it does not, within about ``seconds`` on SQLite.
    """
    url = make_url(database.engine.url)
    if url.get_backend_name() == "sqlite" and url.database is not None:
        return await asyncio.to_thread(_sqlite_revision, Path(url.database), seconds)
    async with database.read() as session:
        return (await session.execute(text(_REVISION))).scalar_one_or_none()


def _sqlite_revision(path: Path, seconds: float) -> str | None:
    """By a connection of its own: the service's own would wait on the event loop, and still see a file that is gone."""
    uri = f"{path.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        row = connection.execute(_REVISION).fetchone()
        connection.execute("ROLLBACK")
    return None if row is None else str(row[0])
