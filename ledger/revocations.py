"""Watch for revoked API keys: ends the samples that they have begun, in every process, soon after the revocation.

A key may be revoked by a command in a process of its own, which reaches the service by the database alone.
"""

import asyncio
from datetime import timedelta

from contracts.errors import Cancelled
from ledger.cancellation import OfKey
from ledger.ledger import Ledger
from store.clock import Clock
from store.database import Database
from store.repeat import repeat
from tenants.keys import keys_revoked_since

LOOK_SECONDS = 0.5
"""Seconds between two looks: what a key has begun ends within a second of its revocation."""
_WINDOW = timedelta(hours=1)
"""Age of the revocations that are looked at; the clock of the process that revokes may be slow by so much."""


def key_revoked() -> Cancelled:
    """Return the error of an operation whose API key was revoked before it was done."""
    return Cancelled("cancelled: the API key that sent this request was revoked")


class Revocations:
    """Keys that were revoked lately, as one process knows them."""

    def __init__(self, database: Database, ledger: Ledger, clock: Clock) -> None:
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._known: set[int] = set()

    def is_revoked(self, key: int) -> bool:
        """Return whether the key is known to have been revoked lately. No question to the database."""
        return key in self._known

    async def run(self, stopping: asyncio.Event | None = None) -> None:
        """Look until ``stopping``, or until cancelled."""
        failed = "revoked keys could not be looked for"
        await repeat(self.look, seconds=LOOK_SECONDS, stopping=stopping, failed=failed)

    async def look(self) -> None:
        """End the pending samples of keys that were revoked since the last look. Raises ``Unavailable``."""
        async with self._database.read() as session:
            revoked = await keys_revoked_since(session, self._clock() - _WINDOW)
        fresh, self._known = revoked - self._known, self._known & revoked
        for key in sorted(fresh):
            async with self._database.write() as transaction:
                await self._ledger.cancel(transaction, OfKey(key), key_revoked(), only_samples=True)
            self._known.add(key)
