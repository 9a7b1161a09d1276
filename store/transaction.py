"""Sessions whose statements over tables go straight to the connection.

SQLAlchemy's session is made for mapped objects. For a statement over tables, such as the ledger's, the session costs several
times what the statement does, and on SQLite the async wrapper costs as much again (decision 37).
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from sqlalchemy import Connection, Executable
from sqlalchemy.engine import CursorResult
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from store.statement_limit import cancelled_after, interrupted_after, statement_limit

SQLITE_BUSY_SECONDS = 4
"""Longest wait for another process, such as an admin command, to commit. It blocks the event loop."""
_LOCKED_SECONDS = 0.05
"""The same after a wait in vain: each task that writes would block the loop in its turn, and nobody be answered meanwhile."""


class Transaction(AsyncSession):
    """A session on one connection, for one transaction or for reading. The connection is the caller's.

    SQLAlchemy's own part, which costs more than a short statement, is made when a mapped object first needs it.
    """

    def __init__(self, connection: AsyncConnection, *, seconds: float | None = None) -> None:
        """``seconds``: the most that one statement may take, None for no limit here."""
        self._connection = connection
        self._seconds = seconds
        self._info: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Make SQLAlchemy's session, which has not been asked for before."""
        if name not in ("sync_session", "_proxied"):
            raise AttributeError(name)
        # Joined: objects are flushed into the connection's transaction, which ``commit`` ends.
        super().__init__(
            self._connection, expire_on_commit=False, autoflush=False, join_transaction_mode="rollback_only"
        )
        return self.__dict__[name]

    @property
    def info(self) -> dict[Any, Any]:
        """Notes of the transaction's users."""
        return self._info

    def get_bind(self, *_mapper: Any, **_options: Any) -> Connection:
        """Return the connection, on which every statement runs."""
        return _inline(self._connection)

    def in_transaction(self) -> bool:
        """Return whether SQLAlchemy's session has begun something, such as to write its objects."""
        return self._has_session and super().in_transaction()

    @property
    def _has_session(self) -> bool:
        return "sync_session" in self.__dict__

    async def execute(self, statement: Executable, params: Any = None, **options: Any) -> Any:
        """Run ``statement`` and return its result, whose rows are in memory. Raises ``Unavailable`` beyond the limit."""
        if self._seconds is None:
            return await self._execute(statement, params, options)
        async with self._within(self._seconds):
            return await self._execute(statement, params, options)

    async def _execute(self, statement: Executable, params: Any, options: Mapping[str, Any]) -> Any:
        if options or _has_objects(statement):
            return await super().execute(statement, params, **options)
        return await self._run(statement, params)

    async def scalar(self, statement: Executable, params: Any = None, **options: Any) -> Any:
        """Run ``statement`` and return the first column of its first row, or None."""
        return (await self.execute(statement, params, **options)).scalar()

    async def scalars(self, statement: Executable, params: Any = None, **options: Any) -> Any:
        """Run ``statement`` and return the first column of each row."""
        return (await self.execute(statement, params, **options)).scalars()

    async def commit(self) -> None:
        """Write the session's objects, and commit."""
        if self.in_transaction():
            await super().commit()
        await self._end(commits=True)

    async def rollback(self) -> None:
        """Undo everything since the last commit."""
        if self._has_session:
            await super().rollback()
        await self._end(commits=False)

    async def close(self) -> None:
        """Forget the session's objects."""
        if self.in_transaction():
            await super().close()

    async def _run(self, statement: Executable, params: Any) -> CursorResult[Any]:
        return await self._connection.execute(statement, params)

    def _within(self, seconds: float) -> AbstractAsyncContextManager[None]:
        return cancelled_after(seconds)

    async def _end(self, *, commits: bool) -> None:
        if not commits:
            await self._connection.rollback()
            return
        try:
            await self._connection.commit()
        except BaseException:
            # SQLAlchemy sends no ROLLBACK after a COMMIT that failed: the connection's next user would go on in the transaction.
            await self._connection.invalidate()
            raise


class InlineTransaction(Transaction):
    """A session on a connection to SQLite, whose driver never waits: no statement takes a greenlet of SQLAlchemy's."""

    async def _run(self, statement: Executable, params: Any) -> CursorResult[Any]:
        return _inline(self._connection).execute(statement, params)

    def _within(self, seconds: float) -> AbstractAsyncContextManager[None]:
        driver = _inline(self._connection).connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        return interrupted_after(driver, seconds)

    async def _end(self, *, commits: bool) -> None:
        connection = _inline(self._connection)
        if not commits:
            connection.rollback()
            return
        try:
            connection.commit()
        except BaseException:
            connection.invalidate()
            raise


class PooledConnections:
    """Sessions on connections of PostgreSQL's pool."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        # Every read statement sees the newest data anyway, so BEGIN and ROLLBACK around it would be wasted round trips.
        self._reading = engine.execution_options(isolation_level="AUTOCOMMIT")

    def reading(self) -> AbstractAsyncContextManager[Transaction]:
        """Open a session whose statements commit one by one."""
        return self._session(self._reading, statement_limit())

    def writing(self) -> AbstractAsyncContextManager[Transaction]:
        """Begin a transaction, which is rolled back unless it is committed."""
        return self._session(self._engine)

    @staticmethod
    @asynccontextmanager
    async def _session(engine: AsyncEngine, seconds: float | None = None) -> AsyncIterator[Transaction]:
        async with engine.connect() as connection:
            session = Transaction(connection, seconds=seconds)
            try:
                yield session
            finally:
                await session.close()

    def close(self) -> None:
        """Do nothing: the pool has the connections."""


class KeptConnections:
    """Sessions on two connections to SQLite, one for all reads and one that writes. Opened when first used, and kept."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engines = {"read": engine.execution_options(isolation_level="AUTOCOMMIT"), "write": engine}
        self._open: dict[str, AsyncConnection] = {}
        self._opening = asyncio.Lock()
        self._is_locked = False
        """True after a wait for another process's lock in vain, until a transaction begins again."""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Transaction]:
        """Open a session. Each of its statements sees what is committed."""
        session = InlineTransaction(await self._connection("read"), seconds=statement_limit())
        try:
            yield session
        finally:
            await session.close()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[Transaction]:
        """Begin a transaction, which is rolled back unless it is committed. The caller has no other one meanwhile."""
        connection = await self._connection("write")
        try:
            self._begin(_inline(connection))
            session = InlineTransaction(connection)
            try:
                yield session
            finally:
                await session.close()
        finally:
            _inline(connection).rollback()

    def _begin(self, connection: Connection) -> None:
        if self._is_locked:
            _wait_at_most(connection, _LOCKED_SECONDS)
        try:
            # The driver would begin a deferred transaction, in which a write after a read can fail as busy.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        except OperationalError:
            self._is_locked = True
            raise
        if self._is_locked:
            self._is_locked = False
            _wait_at_most(connection, SQLITE_BUSY_SECONDS)

    async def _connection(self, use: str) -> AsyncConnection:
        if (kept := self._usable(use)) is not None:
            return kept
        async with self._opening:
            if (kept := self._usable(use)) is None:
                kept = self._open[use] = await self._engines[use].connect()
            return kept

    def _usable(self, use: str) -> AsyncConnection | None:
        kept = self._open.get(use)
        return None if kept is None or _inline(kept).invalidated else kept

    def close(self) -> None:
        """Close both connections."""
        while self._open:
            _inline(self._open.popitem()[1]).close()


def _wait_at_most(connection: Connection, seconds: float) -> None:
    """Set how long a statement waits for another process's lock."""
    connection.exec_driver_sql(f"PRAGMA busy_timeout={round(seconds * 1e3)}")


def _inline(connection: AsyncConnection) -> Connection:
    """Return the connection under ``connection``."""
    assert connection.sync_connection is not None
    return connection.sync_connection


def _has_objects(statement: Executable) -> bool:
    """Return whether the statement is over mapped classes. SQLAlchemy's session asks the same, and offers no other way."""
    return "compile_state_plugin" in statement._propagate_attrs
