"""PostgreSQL's pages that a call reads, from the cache or from disk. Other work on the machine does not change their number."""

import statistics
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

import psycopg
from sqlalchemy import URL, make_url, text

from store.database import Database

T = TypeVar("T")

_FLUSH = text("SELECT pg_stat_force_next_flush()")
_READ = "SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = %s"


class BufferMeter:
    """Counts the pages that the calls on one database read.

    The counters are the whole database's, so nothing else may use it. They are read from another database of the server.
    """

    def __init__(self, server: URL, url: str) -> None:
        self._connection = psycopg.connect(
            server.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
        )
        self._name = make_url(url).database

    def __enter__(self) -> Self:
        """Return the meter."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the connection."""
        self._connection.close()

    async def pages(self, database: Database, work: Awaitable[T]) -> tuple[int, T]:
        """Return the pages that ``work`` reads, and its outcome. ``database`` has opened one connection."""
        before = await self._pages(database)
        outcome = await work
        return await self._pages(database) - before, outcome

    async def median(self, database: Database, call: Callable[[], Awaitable[object]], times: int) -> int:
        """Return the median of the pages that ``times`` runs of ``call`` read."""
        return int(statistics.median([(await self.pages(database, call()))[0] for _ in range(times)]))

    async def _pages(self, database: Database) -> int:
        """Return the pages that were read so far; a server process otherwise tells of them once a second."""
        async with database.read() as session:
            await session.execute(_FLUSH)
        row = self._connection.execute(_READ, [self._name]).fetchone()
        return 0 if row is None else int(row[0])
