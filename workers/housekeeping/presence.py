"""The loop in which a process that answers clients says that it does."""

import asyncio

from ledger.runtime import Runtime
from store.repeat import repeat
from tenants.presence import note_interval, note_presence


class PresenceNotes:
    """Notes the presence of a process that answers clients: no session ends for the time without any such process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._timeout = runtime.settings.session_timeout

    async def run(self, stopping: asyncio.Event | None = None) -> None:
        """Note the presence until ``stopping``, or until cancelled."""
        seconds = note_interval(self._timeout).total_seconds()
        await repeat(self.note, seconds=seconds, stopping=stopping, failed="the service's presence could not be noted")

    async def note(self) -> None:
        """Note the presence once. Raises ``Unavailable``."""
        async with self._runtime.database.write() as session:
            await note_presence(session, now=self._runtime.clock(), session_timeout=self._timeout)
