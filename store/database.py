"""Connections and transactions. One request or one task step is one transaction; the edge commits."""

import asyncio
import os
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from time import monotonic
from typing import Any, cast

from sqlalchemy import Table, event
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, DisconnectionError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.pool import ConnectionPoolEntry

from contracts.errors import Unavailable
from store.inline_sqlite import InlineConnection

SQLITE_BUSY_SECONDS = 10
"""Wait for another process (an admin command) to commit; the event loop stands still meanwhile."""

DEFAULT_POOL = 16
"""Connections of one process to PostgreSQL."""
CONNECT_SECONDS = 5.0
COMMAND_SECONDS = 30.0
"""The longest statement; a server that is slower counts as gone."""
IDLE_SECONDS = 3.0
"""How long the server lets a transaction stand still: a process that is frozen, or cut off, in the middle of one would keep
others from its rows for ever."""
POOL_SECONDS = 10.0
"""The longest wait for a free connection."""

_TRUSTED_SECONDS = 1.0
"""How long a connection counts as alive after it was used."""

_SQLITE_OUTAGES = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)
_AFTER_COMMIT = "weft_after_commit"


def this_host() -> str:
    """What this machine calls itself."""
    return socket.gethostname()[:200]


def session_name(host: str, pid: int) -> str:
    """What PostgreSQL calls the connections of a process, in at most 63 characters."""
    return f"weft {pid} {host}"[:63]


def create_engine(url: str, *, pool_size: int = DEFAULT_POOL) -> AsyncEngine:
    """An async engine with weft's connection settings: WAL and foreign keys on SQLite, a pool of ``pool_size`` on PostgreSQL."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        engine = create_async_engine(
            url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_SECONDS,
            connect_args={
                "timeout": CONNECT_SECONDS,
                "command_timeout": COMMAND_SECONDS,
                "server_settings": {
                    "application_name": session_name(this_host(), os.getpid()),
                    "idle_in_transaction_session_timeout": str(int(IDLE_SECONDS * 1e3)),
                },
            },
        )
        _ping_idle_ones(engine)
        return engine
    path = parsed.database or ":memory:"

    async def connect() -> InlineConnection:
        return await InlineConnection(path, busy_seconds=SQLITE_BUSY_SECONDS)

    engine = create_async_engine(url, pool_size=8, max_overflow=0, async_creator=connect)

    @event.listens_for(engine.sync_engine, "connect")
    def _set_pragmas(connection: Any, _record: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return engine


def _ping_idle_ones(engine: AsyncEngine) -> None:
    """Have connections that were idle for a while asked whether they live. For busy ones that would be a round trip a use."""

    @event.listens_for(engine.sync_engine, "checkin")
    def note(_connection: object, record: ConnectionPoolEntry) -> None:
        record.info["used_at"] = monotonic()

    @event.listens_for(engine.sync_engine, "checkout")
    def ping(connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
        if monotonic() - record.info.get("used_at", monotonic()) < _TRUSTED_SECONDS:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise DisconnectionError("the connection was lost while it was idle") from error


def after_commit(transaction: AsyncSession, callback: Callable[[], None]) -> None:
    """Run ``callback`` once ``transaction`` has committed (never when it rolls back)."""
    transaction.info.setdefault(_AFTER_COMMIT, []).append(callback)


def insert_unless_present(transaction: AsyncSession, table: type[DeclarativeBase]) -> SqliteInsert | PostgresInsert:
    """An insert that does nothing, and returns no row, when a unique key is taken: no savepoint, no race."""
    if transaction.get_bind().dialect.name == "sqlite":
        return sqlite_insert(table).on_conflict_do_nothing()
    return postgres_insert(table).on_conflict_do_nothing()


def replacing_insert(transaction: AsyncSession, table: type[DeclarativeBase]) -> SqliteInsert | PostgresInsert:
    """An insert that takes the place of the row with the same primary key, whole."""
    return _replacing_insert(transaction.get_bind().dialect.name, table)


# Built once: that takes longer than to execute it.
@cache
def _replacing_insert(dialect: str, table: type[DeclarativeBase]) -> SqliteInsert | PostgresInsert:
    # The plain table: no object is to be made of the row.
    plain = cast(Table, table.__table__)
    columns = plain.columns
    statement = sqlite_insert(plain) if dialect == "sqlite" else postgres_insert(plain)
    return statement.on_conflict_do_update(
        index_elements=[column for column in columns if column.primary_key],
        set_={column.name: statement.excluded[column.name] for column in columns if not column.primary_key},
    )


@contextmanager
def _outages_told() -> Iterator[None]:
    """Turn what a driver says of a database that is gone, slow or full into ``Unavailable``."""
    try:
        yield
    except (DBAPIError, PoolTimeout, OSError) as error:
        if isinstance(error, DBAPIError) and not _is_outage(error):
            raise
        raise Unavailable("the database does not answer; try again in a moment") from error
    except Exception as error:
        # asyncpg's own errors come as they are when a connection cannot be made.
        if type(error).__module__.partition(".")[0] != "asyncpg":
            raise
        raise Unavailable("the database takes no connection; try again in a moment") from error


def _is_outage(error: DBAPIError) -> bool:
    if isinstance(error.orig, sqlite3.Error):
        return (error.orig.sqlite_errorcode & 0xFF) in _SQLITE_OUTAGES
    return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)


class Database:
    """Hands out read and write transactions.

    SQLite has one writer: writes of this process queue on a lock instead of on SQLite's own busy loop.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._sessions = async_sessionmaker(engine, expire_on_commit=False, autoflush=False)
        # Each statement for itself, as it sees the database anyway: no BEGIN and no ROLLBACK around it.
        reading = engine if self._is_sqlite else engine.execution_options(isolation_level="AUTOCOMMIT")
        self._readers = async_sessionmaker(reading, expire_on_commit=False, autoflush=False)
        self._writer = asyncio.Lock()

    @property
    def has_one_service(self) -> bool:
        """Whether one process at a time serves from it: SQLite; several share a PostgreSQL."""
        return self._is_sqlite

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A session for queries; nothing is committed. Raises ``Unavailable``."""
        with _outages_told():
            async with self._readers() as session:
                yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """One transaction: commits on leaving, rolls back on an exception, then runs the after-commit callbacks.

        Raises ``Unavailable``: what was written is there whole, or not at all.
        """
        with _outages_told():
            if self._is_sqlite:
                async with self._writer, self._transaction() as session:
                    yield session
            else:
                async with self._transaction() as session:
                    yield session

    @asynccontextmanager
    async def write_one(self) -> AsyncIterator[AsyncSession]:
        """A session for a single statement that writes, which commits by itself: one round trip instead of three.

        Raises ``Unavailable``. For what needs no callback after the commit.
        """
        async with self.write() if self._is_sqlite else self.read() as session:
            yield session

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncSession]:
        async with self._sessions() as session:
            if self._is_sqlite:
                # The driver begins lazily and deferred; a read followed by a write could then fail as busy.
                connection = await session.connection()
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield session
            await session.commit()
            callbacks: list[Callable[[], None]] = session.info.pop(_AFTER_COMMIT, [])
        for callback in callbacks:
            callback()

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()
