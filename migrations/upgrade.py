"""Upgrades and downgrades of a database's schema by Alembic, called from code without an ``alembic.ini``."""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, event, func, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

from contracts.errors import InvalidRequest

log = logging.getLogger(__name__)

_LOCK = 7_136_520_931
"""Key of PostgreSQL's advisory lock on the schema: any number that no other program takes."""
_PATIENCE_SECONDS = 3600.0
"""Longest wait for another process that upgrades: building the indexes of a large ledger takes long."""
_LOOK_SECONDS = 0.2

_SYNC_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}


def upgrade(url: str, revision: str = "head") -> None:
    """Upgrade the database at ``url`` (async or sync driver). A schema that is newer than this code stays as it is.

    Each revision is a transaction of its own. Of several processes that upgrade at once, one works and the others wait.
    Blocking. Raises ``InvalidRequest`` for a database that cannot be opened, SQLAlchemy's and Alembic's errors, ``TimeoutError``
    after waiting for long.
    """
    if _current(url) == revisions().get_current_head() and revision == "head":
        return
    with _alone(url):
        if revision == "head" and is_newer(url):
            log.warning("the schema is newer than this version of weft; migrations only add, so it is used as it is")
            return
        command.upgrade(alembic_config(url), revision)


def downgrade(url: str, revision: str) -> None:
    """Downgrade the database at ``url`` to ``revision`` (``base``: empty). Blocking."""
    with _alone(url):
        command.downgrade(alembic_config(url), revision)


@contextmanager
def _alone(url: str) -> Iterator[None]:
    """Hold the right to change the schema. Raises ``TimeoutError``."""
    engine = blocking_engine(url)
    try:
        if engine.dialect.name == "sqlite":
            with _folder_lock(Path(engine.url.database or ".").absolute().parent):
                yield
            return
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            # Asked again and again: who waits inside a statement holds up the building of indexes, and so the other for ever.
            _wait(lambda: bool(connection.scalar(select(func.pg_try_advisory_lock(_LOCK)))))
            yield
    finally:
        # Closing the connection gives the lock back.
        engine.dispose()


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Hold a lock on the database's folder, which SQLite itself does not use."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _wait(lambda: _try_lock(descriptor))
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(is_mine: Callable[[], bool]) -> None:
    ends, never = monotonic() + _PATIENCE_SECONDS, Event()
    while not is_mine():
        if monotonic() >= ends:
            raise TimeoutError("another process has been upgrading this database's schema for long")
        never.wait(_LOOK_SECONDS)


def current_is_head(url: str) -> bool:
    """Return whether the schema at ``url`` is the newest. Blocking. Raises ``InvalidRequest`` as ``upgrade``."""
    return _current(url) == revisions().get_current_head()


def is_newer(url: str) -> bool:
    """Return whether the schema at ``url`` is a later version's: this version does not know its revision. Blocking."""
    current = _current(url)
    return current is not None and current not in {one.revision for one in revisions().walk_revisions()}


def check_not_older(url: str) -> None:
    """Raise ``InvalidRequest`` when the schema at ``url`` is older than this version. Blocking."""
    if not (current_is_head(url) or is_newer(url)):
        raise InvalidRequest("the database's schema is older than this version; run `weft db upgrade`")


def _current(url: str) -> str | None:
    """Return the schema's revision, None without any. Raises ``InvalidRequest`` for a database that cannot be opened."""
    engine = blocking_engine(url)
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except DBAPIError as error:
        cause = str(error.orig).partition("\n")[0]
        raise InvalidRequest(
            f"the database cannot be opened: {cause}; `weft doctor` looks at it and at WEFT_DATABASE_URL"
        ) from error
    finally:
        engine.dispose()


@cache
def revisions() -> ScriptDirectory:
    """Return this version's revisions, which a process reads once."""
    return ScriptDirectory(str(Path(__file__).parent))


def alembic_config(url: str) -> Config:
    """Return Alembic's configuration for ``url``."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = url
    return config


def blocking_engine(url: str) -> Engine:
    """Return an engine with the blocking driver. On SQLite a transaction holds every statement, changes of the schema too."""
    engine = create_engine(sync_url(url))
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _leave_transactions_alone)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def _leave_transactions_alone(connection: Any, _record: ConnectionPoolEntry) -> None:
    connection.isolation_level = None


def sync_url(url: str) -> URL:
    """Return ``url`` with the blocking driver of the same database, which calls asyncpg's ``ssl`` by another name."""
    parsed = make_url(url)
    query = {("sslmode" if name == "ssl" else name): value for name, value in parsed.query.items()}
    return parsed.set(drivername=_SYNC_DRIVERS[parsed.get_backend_name()], query=query)
