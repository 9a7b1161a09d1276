"""A time limit on the statements of one caller's reads: a page that asks for too much is told so, and holds nobody up."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from time import monotonic

from sqlalchemy.exc import OperationalError

from contracts.errors import Unavailable

_STEPS = 10_000
"""Steps of SQLite's machine between two looks at the clock: some 0.1 ms."""
_limit: ContextVar[float | None] = ContextVar("statement_limit", default=None)


@contextmanager
def statements_within(seconds: float) -> Iterator[None]:
    """Have each statement of the block's reads end within so many seconds. Tasks that begin in the block have the limit, too."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


def statement_limit() -> float | None:
    """Return the most seconds of a statement of the current reads, None for no limit but the database's own."""
    return _limit.get()


def too_slow(seconds: float) -> Unavailable:
    """Return the error of a statement that took longer."""
    return Unavailable(f"the database took longer than {seconds:g} s; ask for less at once, or try again in a moment")


@asynccontextmanager
async def cancelled_after(seconds: float) -> AsyncIterator[None]:
    """Cancel the statement of the block, on the server too, once it has run for so many seconds, and raise ``Unavailable``."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise too_slow(seconds) from error


@asynccontextmanager
async def interrupted_after(connection: sqlite3.Connection, seconds: float) -> AsyncIterator[None]:
    """Interrupt SQLite's statement of the block once it has run for so many seconds, and raise ``Unavailable``."""
    end = monotonic() + seconds
    connection.set_progress_handler(lambda: monotonic() > end, _STEPS)
    try:
        yield
    except OperationalError as error:
        if isinstance(error.orig, sqlite3.Error) and error.orig.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
            raise too_slow(seconds) from error
        raise
    finally:
        connection.set_progress_handler(None, 0)
