"""Watch for API keys that have ended, revoked or expired, and for tenants that are blocked: ends what they have open.

A key's samples end with it. Those of a blocked tenant wait, but for those that somebody follows on a connection. A command in a
process of its own may revoke or block, which reaches the service by the database alone.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from contracts.errors import Cancelled
from contracts.ids import TenantId
from ledger.cancellation import OfKeys
from ledger.ledger import Ledger
from store.clock import Clock
from store.database import Database
from store.repeat import repeat
from tenants.keys import keys_ended_between
from tenants.suspensions import blocked_tenants

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
    """Keys that have ended lately, and tenants that are blocked, as one process knows them."""

    def __init__(self, database: Database, ledger: Ledger, clock: Clock) -> None:
        self._database = database
        self._ledger = ledger
        self._clock = clock
        self._known: set[int] = set()
        self._pending: dict[int, TenantId] = {}
        """Keys whose samples are not ended yet."""
        self._blocked: dict[TenantId, str | None] = {}
        """Reasons of the tenants that are blocked."""
        self._when_blocked: defaultdict[TenantId, set[Callable[[], None]]] = defaultdict(set)

    def has_ended(self, key: int) -> bool:
        """Return whether the key is known to have ended lately. No question to the database."""
        return key in self._known

    def of(self, tenant: TenantId, key: int | None) -> Callable[[], bool]:
        """Return a question whether the key, if there is one, is known to have ended since, or the tenant to be blocked."""
        return lambda: tenant in self._blocked or (key is not None and self.has_ended(key))

    def reason_of_block(self, tenant: TenantId) -> str | None:
        """Return the operator's reason for which the tenant is blocked."""
        return self._blocked.get(tenant)

    @contextmanager
    def when_blocked(self, tenant: TenantId, end: Callable[[], None]) -> Iterator[None]:
        """Call ``end`` once if the tenant is blocked inside the block of code, or is already."""
        if tenant in self._blocked:
            end()
        calls = self._when_blocked[tenant]
        calls.add(end)
        try:
            yield
        finally:
            calls.discard(end)
            if not calls:
                del self._when_blocked[tenant]

    async def run(self, stopping: asyncio.Event | None = None) -> None:
        """Look until ``stopping``, or until cancelled."""
        failed = "ended keys could not be looked for"
        await repeat(self.look, seconds=LOOK_SECONDS, stopping=stopping, failed=failed)

    async def look(self) -> None:
        """End the pending samples of keys that have ended since the last look, and what blocked tenants follow.

        Raises ``Unavailable``.
        """
        async with self._database.read() as session:
            now = self._clock()
            ended = await keys_ended_between(session, now - _WINDOW, now)
            blocked = await blocked_tenants(session)
        # Known at once: what a key has open ends before anybody's samples are looked for.
        self._pending |= {key: tenant for key, tenant in ended.items() if key not in self._known}
        self._known = set(ended)
        new, self._blocked = blocked.keys() - self._blocked.keys(), blocked
        for tenant in new:
            for end in list(self._when_blocked.get(tenant, ())):
                end()
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
