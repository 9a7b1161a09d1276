"""The database's clock in every process: hosts' clocks differ, and what ends at a time must end for all at once."""

import asyncio
from datetime import UTC, datetime, timedelta
from time import monotonic

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.clock import Clock, utc_now
from store.database import Database
from store.repeat import repeat

_SECONDS = 30.0
"""Seconds between two readings of the database's time."""
_READINGS = 3


class DatabaseClock:
    """A ``Clock`` that tells PostgreSQL's time, within milliseconds; with SQLite, which serves one machine, the host's.

    Between two readings it goes on by the host's monotonic clock, which nobody sets. Before the first it is the host's time.
    """

    def __init__(self) -> None:
        self._read: tuple[datetime, float] | None = None

    def __call__(self) -> datetime:
        """Return the current aware UTC time."""
        if self._read is None:
            return utc_now()
        at, when = self._read
        return at + timedelta(seconds=monotonic() - when)

    async def read(self, database: Database) -> None:
        """Read the database's time; of a few readings the quickest counts. Raises ``Unavailable``."""
        if database.has_one_service:
            return
        best = float("inf")
        async with database.read() as session:
            for _ in range(_READINGS):
                asked = monotonic()
                now: datetime = (await session.execute(select(func.clock_timestamp()))).scalar_one()
                answered = monotonic()
                if answered - asked < best:
                    best = answered - asked
                    self._read = now.astimezone(UTC), (asked + answered) / 2

    async def run(self, database: Database, stopping: asyncio.Event | None = None) -> None:
        """Read the database's time again and again, until ``stopping`` or cancelled."""

        async def again() -> None:
            await self.read(database)

        await repeat(again, seconds=_SECONDS, stopping=stopping, failed="the database's time could not be read")


async def clock_of(database: Database) -> DatabaseClock:
    """Return a clock that tells the database's time. Raises ``Unavailable``."""
    clock = DatabaseClock()
    await clock.read(database)
    return clock


async def database_now(session: AsyncSession, clock: Clock) -> datetime:
    """Return the time that all processes share: PostgreSQL's, or ``clock`` with SQLite, which serves one machine."""
    if session.get_bind().dialect.name == "sqlite":
        return clock()
    now: datetime = (await session.execute(select(func.clock_timestamp()))).scalar_one()
    return now
