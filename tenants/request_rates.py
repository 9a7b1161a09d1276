"""Rates of requests: the most requests a minute of a tenant, a project or a key that are answered. A coarse guard.

A request over the rate is refused, so it counts only where a client may be told to come again (``api.route_bounds``). Requests
are counted by a sliding window over the last minute, in Redis where there is one. Without it each process counts by itself. What
must be exact is counted in the database: ``tenants.rates`` counts tokens.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor
from time import monotonic
from typing import TypeVar

from limits.aio.storage import MemoryStorage, SlidingWindowCounterSupport
from limits.errors import StorageError

from contracts.ids import TenantId

REQUEST_RATE = "requests_per_minute"
"""Name of the limit."""
WINDOW_SECONDS = 60
PATIENCE_SECONDS = 0.5
"""Longest wait for the storage that processes share."""
_PAUSE_SECONDS = 1.0
"""Time without a question to a shared storage that did not answer."""

T = TypeVar("T")


class RequestScope(StrEnum):
    """Owner of a rate of requests: a tenant, or one of its projects or keys."""

    KEY = "key"
    PROJECT = "project"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class RequestRate:
    """Rate of requests. ``id`` is the number of the key, the id of the project, or the tenant's."""

    tenant: TenantId
    scope: RequestScope
    id: str
    per_minute: int

    @property
    def name(self) -> str:
        """Name under which requests are counted. A rate that is changed goes on with the count."""
        return f"{self.tenant}/{self.scope}/{self.id}"


@dataclass(frozen=True, slots=True)
class RequestCount:
    """Count of a rate's requests in the last minute.

    One more is let in after ``seconds``, 0 for now; all that were ``used`` are forgotten after ``reset`` seconds.
    """

    rate: RequestRate
    used: int
    seconds: int
    reset: int

    @property
    def remaining(self) -> int:
        """Number of requests that are answered now."""
        return max(0, self.rate.per_minute - self.used)


def request_rate(
    tenant: TenantId, scope: RequestScope, id: object, limits: Mapping[str, int] | None
) -> list[RequestRate]:
    """Return the rate among ``limits`` as a list of it, empty for no rate."""
    per_minute = (limits or {}).get(REQUEST_RATE, 0)
    return [RequestRate(tenant, scope, str(id), per_minute)] if per_minute else []


class RequestRates:
    """Counts of one process, or of all that share a storage."""

    def __init__(self, shared: SlidingWindowCounterSupport | None = None) -> None:
        """``shared`` counts for all processes, None for a process that is alone."""
        self._own = MemoryStorage()
        self._shared = shared
        self._asks_again_at = 0.0

    @property
    def counts_alone(self) -> bool:
        """True while the shared storage does not answer, so that other processes' requests are not counted here."""
        return self._shared is not None and monotonic() < self._asks_again_at

    async def count(self, rates: Collection[RequestRate]) -> tuple[RequestCount, bool]:
        """Count a request in each of ``rates``, and return the tightest's count and True, or a refusing one's count and False.

        A request that one refuses does not count in those behind it: name a tenant's last.
        """
        counts: list[RequestCount] = []
        for rate in rates:
            is_let_in = await self._ask(
                lambda storage, rate=rate: storage.acquire_sliding_window_entry(  # type: ignore[misc]
                    rate.name, rate.per_minute, WINDOW_SECONDS
                )
            )
            count = await self.of(rate)
            if not is_let_in:
                return count, False
            counts.append(count)
        return min(counts, key=lambda count: count.remaining), True

    async def of(self, rate: RequestRate) -> RequestCount:
        """Return the count of a rate, and count nothing."""
        before, before_left, now, now_left = await self._ask(
            lambda storage: storage.get_sliding_window(rate.name, WINDOW_SECONDS)
        )
        used = floor(before * before_left / WINDOW_SECONDS) + now
        seconds = 0 if used < rate.per_minute else _wait(rate, before, before_left, now, now_left)
        return RequestCount(rate, used, seconds, reset=ceil(now_left if now else before_left if used else 0.0))

    async def look(self) -> None:
        """Ask the shared storage for anything, if there is one, so that ``counts_alone`` is of now."""
        await self._ask(lambda storage: storage.get_sliding_window("look", WINDOW_SECONDS))

    async def _ask(self, ask: Callable[[SlidingWindowCounterSupport], Awaitable[T]]) -> T:
        if self._shared is not None and not self.counts_alone:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    return await ask(self._shared)
            except (StorageError, TimeoutError, OSError):
                self._asks_again_at = monotonic() + _PAUSE_SECONDS
        return await ask(self._own)


def _wait(rate: RequestRate, before: int, before_left: float, now: int, now_left: float) -> int:
    """Return the whole seconds until one more request is let in: what the window before holds fades evenly.

    ``before_left`` and ``now_left`` are the seconds until the counts of both windows are forgotten.
    """
    if now < rate.per_minute:
        seconds = before_left - (rate.per_minute - now) * WINDOW_SECONDS / before
    else:
        # This window ends first, and fades then.
        seconds = now_left - rate.per_minute * WINDOW_SECONDS / now
    return min(WINDOW_SECONDS, floor(max(0.0, seconds)) + 1)
