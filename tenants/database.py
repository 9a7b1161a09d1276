"""Connections and transactions. One request or one task step is one transaction; the edge commits."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import event
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.pool import ConnectionPoolEntry

from tenants.inline_sqlite import InlineConnection

SQLITE_BUSY_SECONDS = 10
"""Wait for another process (an admin command) to commit; the event loop stands still meanwhile."""

_AFTER_COMMIT = "weft_after_commit"


def create_engine(url: str) -> AsyncEngine:
    """An async engine with weft's connection settings: WAL and foreign keys on SQLite, bounded pool on PostgreSQL."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_size=10, max_overflow=10, pool_pre_ping=True)
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


def after_commit(transaction: AsyncSession, callback: Callable[[], None]) -> None:
    """Run ``callback`` once ``transaction`` has committed (never when it rolls back)."""
    transaction.info.setdefault(_AFTER_COMMIT, []).append(callback)


def insert_unless_present(transaction: AsyncSession, table: type[DeclarativeBase]) -> SqliteInsert | PostgresInsert:
    """An insert that does nothing, and returns no row, when a unique key is taken: no savepoint, no race."""
    if transaction.get_bind().dialect.name == "sqlite":
        return sqlite_insert(table).on_conflict_do_nothing()
    return postgres_insert(table).on_conflict_do_nothing()


class Database:
    """Hands out read and write transactions.

    SQLite has one writer: writes of this process queue on a lock instead of on SQLite's own busy loop.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._sessions = async_sessionmaker(engine, expire_on_commit=False, autoflush=False)
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._writer = asyncio.Lock()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A session for queries; nothing is committed."""
        async with self._sessions() as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """One transaction: commits on leaving, rolls back on an exception, then runs the after-commit callbacks."""
        if self._is_sqlite:
            async with self._writer, self._transaction() as session:
                yield session
        else:
            async with self._transaction() as session:
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
