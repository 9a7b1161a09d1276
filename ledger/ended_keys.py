"""Watch for API keys that have ended, revoked or expired: ends the samples that they have begun, in every process.

A key may be revoked by a command in a process of its own, which reaches the service by the database alone.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta

from contracts.errors import Cancelled
from contracts.ids import TenantId
from ledger.cancellation import OfKeys
from ledger.ledger import Ledger
from store.clock import Clock
from store.database import Database
from store.repeat import repeat
from tenants.keys import keys_ended_between

LOOK_SECONDS = 0.5
"""Seconds between two looks: what a key has begun ends within a second of the key."""
_WINDOW = timedelta(hours=1)
"""Age of the ends that are looked at; the clock of the process that revokes may be slow by so much."""


def key_ended() -> Cancelled:
    """Return the error of an operation whose API key ended before it was done."""
    return Cancelled(
        "cancelled: the API key that sent this request was revoked or has expired; send a new request with another"
    )


class EndedKeys:
    """Keys that have ended lately, as one process knows them."""

    def __init__(self, database: Database, ledger: Ledger, clock: Clock) -> None:
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._known: set[int] = set()
        self._pending: dict[int, TenantId] = {}
        """Keys whose samples are not ended yet."""

    def has_ended(self, key: int) -> bool:
        """Return whether the key is known to have ended lately. No question to the database."""
        return key in self._known

    def of(self, key: int | None) -> Callable[[], bool]:
        """Return a question whether the key, if there is one, is known to have ended since."""
        return lambda: key is not None and self.has_ended(key)

    async def run(self, stopping: asyncio.Event | None = None) -> None:
        """Look until ``stopping``, or until cancelled."""
        failed = "ended keys could not be looked for"
        await repeat(self.look, seconds=LOOK_SECONDS, stopping=stopping, failed=failed)

    async def look(self) -> None:
        """End the pending samples of keys that have ended since the last look. Raises ``Unavailable``."""
        async with self._database.read() as session:
            now = self._clock()
            ended = await keys_ended_between(session, now - _WINDOW, now)
        # Known at once: what a key has open ends before anybody's samples are looked for.
        self._pending |= {key: tenant for key, tenant in ended.items() if key not in self._known}
        self._known = set(ended)
        keys: dict[TenantId, list[int]] = {}
        for key, tenant in sorted(self._pending.items()):
            keys.setdefault(tenant, []).append(key)
        # A tenant's keys together: very many of one tenant keep the samples of another's for one transaction.
        for tenant, of_tenant in sorted(keys.items(), key=lambda one: len(one[1])):
            async with self._database.write() as transaction:
                await self._ledger.cancel(transaction, OfKeys(tenant, of_tenant), key_ended(), only_samples=True)
            for key in of_tenant:
                del self._pending[key]
            await asyncio.sleep(0)
