"""Connections to the database, and its transactions.

One request, or one step of a task, is one transaction. The code that opens a transaction commits it.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from store.fair_places import FairPlaces
from store.inline_sqlite import InlineConnection, inline_url
from store.letters import know_every_letter
from store.outages import outages_as_unavailable
from store.statement_parameters import clean_parameters
from store.surveys import Surveys, survey_place
from store.transaction import SQLITE_BUSY_SECONDS, KeptConnections, PooledConnections

DEFAULT_POOL = 16
"""Most connections of one process to PostgreSQL."""
_PARTS_OF_POOL = 4
"""Surveys have one of as many parts of a pool of connections."""
CONNECT_SECONDS = 5.0
"""Longest time to open a connection."""
COMMAND_SECONDS = 30.0
"""Longest time of one statement; a slower server counts as gone."""
IDLE_SECONDS = 10.0
"""Longest time that PostgreSQL lets a transaction stand idle.

A process that freezes, or loses the network, in the middle of a transaction would otherwise keep its row locks for ever.
A busy machine can keep a process that is well from its processors for some seconds.
"""
POOL_SECONDS = 10.0
"""Longest wait for a free connection of the pool."""

_JOURNAL_BYTES = 64 * 2**20
"""Size to which SQLite's log is cut once it begins anew: surveys that overlap keep it growing until then."""
_TRUSTED_SECONDS = 1.0
"""Seconds after its last use for which a connection counts as alive without a ping."""

_AFTER_COMMIT = "weft_after_commit"


def this_host() -> str:
    """Return this machine's host name, at most 200 characters."""
    return socket.gethostname()[:200]


def session_name(host: str, pid: int) -> str:
    """Return PostgreSQL's ``application_name`` for the connections of a process, at most 63 characters."""
    return f"weft {pid} {host}"[:63]


def create_engine(url: str, *, pool_size: int = DEFAULT_POOL) -> AsyncEngine:
    """Return an async engine: SQLite with WAL and foreign keys, PostgreSQL with a pool of ``pool_size`` connections."""
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
        _ping_idle_connections(engine)
        clean_parameters(engine)
        return engine
    arguments = {"timeout": SQLITE_BUSY_SECONDS, "check_same_thread": False, "factory": InlineConnection}
    engine = create_async_engine(inline_url(parsed), connect_args=arguments)
    clean_parameters(engine)

    @event.listens_for(engine.sync_engine, "connect")
    def _set_pragmas(connection: Any, _record: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        size = f"journal_size_limit={_JOURNAL_BYTES}"
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", size):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()
        know_every_letter(connection)

    return engine


def _ping_idle_connections(engine: AsyncEngine) -> None:
    """Ping connections that were idle for a while before they are used. Busy connections are spared the round trip."""

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


def _pool_size(engine: AsyncEngine) -> int:
    """Return how many connections the engine opens at most."""
    pool = engine.sync_engine.pool
    return pool.size() if isinstance(pool, QueuePool) else DEFAULT_POOL


def after_commit(transaction: AsyncSession, callback: Callable[[], None]) -> None:
    """Run ``callback`` after ``transaction`` has committed; never when it rolls back."""
    transaction.info.setdefault(_AFTER_COMMIT, []).append(callback)


async def undo(transaction: AsyncSession) -> None:
    """Undo all that ``transaction`` has done, and forget its callbacks. Its block goes on, and commits nothing."""
    await transaction.rollback()
    transaction.info.pop(_AFTER_COMMIT, None)


class Database:
    """Opens sessions for reading and transactions for writing, for one tenant's requests in turn with the others'.

    - SQLite has one writer, so this process's writes queue here instead of in SQLite's own busy loop.
    - PostgreSQL has a pool of connections. One tenant's requests have at most half of them: some may wait for a lock.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._connections = KeptConnections(engine) if self._is_sqlite else PooledConnections(engine)
        most = 1 if self._is_sqlite else _pool_size(engine)
        self.places = FairPlaces(most, each=max(1, most // 2))
        self.surveys = Surveys(engine.url) if self._is_sqlite else None
        surveys = max(1, most // _PARTS_OF_POOL)
        self._survey_places = FairPlaces(surveys, each=1, own=max(1, surveys - 1))

    @property
    def has_one_service(self) -> bool:
        """True for SQLite, from which only one process at a time may serve. PostgreSQL is shared."""
        return self._is_sqlite

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Open a session for queries, which commits nothing. Raises ``Unavailable``."""
        with outages_as_unavailable():
            if self._is_sqlite:
                # A query of SQLite runs at once, beside the one that writes.
                async with self._connections.reading() as session:
                    yield session
            else:
                async with self.places.place(patience=POOL_SECONDS), self._connections.reading() as session:
                    yield session

    @asynccontextmanager
    async def survey(self) -> AsyncIterator[AsyncSession]:
        """Open a session as ``read`` does, for queries that may go through many rows. Raises ``Unavailable``.

        One survey of a tenant runs at a time, so a block never opens another one. On PostgreSQL surveys leave most of the
        connections to others, however long they take.
        """
        if self.surveys is None:
            async with survey_place(self._survey_places), self.read() as session:
                yield session
            return
        with outages_as_unavailable():
            async with self.surveys.reading() as session:
                yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction: commit on leaving and run the after-commit callbacks; roll back on an exception.

        Raises ``Unavailable``: the transaction is then committed as a whole or not at all.
        """
        patience = None if self._is_sqlite else POOL_SECONDS
        with outages_as_unavailable():
            async with self.places.place(patience=patience):
                async with self._connections.writing() as session:
                    yield session
                    await session.commit()
                    callbacks: list[Callable[[], None]] = session.info.pop(_AFTER_COMMIT, [])
                for callback in callbacks:
                    callback()

    @asynccontextmanager
    async def write_one(self) -> AsyncIterator[AsyncSession]:
        """Open a session for one writing statement that commits by itself: one round trip instead of three.

        Use it only where nothing needs an after-commit callback. Raises ``Unavailable``.
        """
        async with self.write() if self._is_sqlite else self.read() as session:
            yield session

    async def flush(self) -> None:
        """Have the disk keep what has committed, so that what rows no longer name can be removed. Raises ``OSError``.

        A power cut takes back what SQLite has committed since its log was last written to the disk (``synchronous=NORMAL``).
        """
        if self._is_sqlite:
            await asyncio.to_thread(_flush_log, f"{self.engine.url.database}-wal")

    async def close(self) -> None:
        """Close every connection."""
        self._connections.close()
        await self.engine.dispose()


def _flush_log(path: str) -> None:
    # Without a log everything is in the database's file, which SQLite has flushed before it removed the log.
    with suppress(FileNotFoundError), open(path, "rb") as log:
        os.fsync(log.fileno())
