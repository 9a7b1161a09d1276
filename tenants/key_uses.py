"""Last use of API keys, to the minute. A request notes it in memory, so that it costs no statement of the request's."""

import asyncio
from datetime import datetime

from sqlalchemy import or_, update

from store.database import Database
from store.repeat import repeat
from store.tables import ApiKey

WRITE_SECONDS = 5.0
"""Seconds between two writes of the uses that were noted."""


class KeyUses:
    """Keys that one process has seen used. A key's row is written at most once a minute, however many processes use it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._minute: datetime | None = None
        self._noted: set[int] = set()
        """Keys used in ``_minute`` whose rows are written or need not be."""
        self._due: dict[int, datetime] = {}

    def note(self, key: int, last: datetime | None, now: datetime) -> None:
        """Note that the key is used ``now``; ``last`` is the use that its row has."""
        minute = now.replace(second=0, microsecond=0)
        if minute != self._minute:
            self._minute = minute
            self._noted.clear()
        if key not in self._noted:
            self._noted.add(key)
            if last is None or last < minute:
                self._due[key] = minute

    async def write(self) -> None:
        """Write the uses that are due. Raises ``Unavailable``; they stay due then."""
        due, self._due = self._due, {}
        try:
            async with self._database.write() as transaction:
                for minute in set(due.values()):
                    keys = sorted(key for key, used in due.items() if used == minute)
                    is_older = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < minute)
                    await transaction.execute(
                        update(ApiKey)
                        .where(ApiKey.id.in_(keys), is_older)
                        .values(last_used_at=minute)
                        .execution_options(synchronize_session=False)
                    )
        except BaseException:
            self._due = {**due, **self._due}
            raise

    async def run(self, stopping: asyncio.Event | None = None) -> None:
        """Write until ``stopping``, or until cancelled."""

        async def look() -> None:
            if self._due:
                await self.write()

        await repeat(look, seconds=WRITE_SECONDS, stopping=stopping, failed="uses of keys could not be written")
