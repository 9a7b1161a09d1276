"""Departures: ends the samples that were followed on a connection whose client has gone.

A sample that a repeat of the request would find again ends once nobody has followed it for ``reconnect_grace``. No sample is
ended when the process itself ends: its clients repeat their requests elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

from contracts.errors import Cancelled, Unavailable
from contracts.ids import RequestId, TenantId
from ledger.cancellation import OfOperation
from ledger.runtime import Runtime
from ledger.token_feed import FeedKey
from store.repeat import wait_for

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 5.0
"""Time between two looks at a sample that somebody else may follow, and between two tries to end one."""


class Departures:
    """Samples of one API process whose clients have gone."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._grace = runtime.settings.reconnect_grace.total_seconds()
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}
        self._accepting: set[asyncio.Task[Any]] = set()

    def left(self, key: FeedKey, tenant: TenantId, request_id: RequestId, *, may_return: bool) -> None:
        """End the sample soon; with ``may_return`` only once nobody has followed it for the grace time."""
        if self._runtime.wakeups.is_closed:
            return
        if (earlier := self._tasks.get(request_id)) is not None:
            earlier.cancel()
        task = asyncio.create_task(self._end(key, tenant, request_id, may_return), name=f"left {request_id}")
        self._tasks[request_id] = task

        def ended(task: asyncio.Task[None]) -> None:
            if self._tasks.get(request_id) is task:
                del self._tasks[request_id]

        task.add_done_callback(ended)

    def left_early(self, accepting: "asyncio.Task[T]", leave: Callable[[T], None]) -> None:
        """Call ``leave`` with what ``accepting`` returns: a client has gone before its samples were accepted."""

        def accepted(task: "asyncio.Task[T]") -> None:
            self._accepting.discard(task)
            if not task.cancelled() and task.exception() is None:
                leave(task.result())

        self._accepting.add(accepting)
        accepting.add_done_callback(accepted)

    async def _end(self, key: FeedKey, tenant: TenantId, request_id: RequestId, may_return: bool) -> None:
        grace = self._grace if may_return else 0.0
        followed_at = monotonic()
        while not self._runtime.wakeups.is_closed:
            pause, now = LOOK_SECONDS, monotonic()
            # Another process tells only some time later that its follower has left.
            if self._runtime.feed.is_followed(key):
                followed_at = now
            elif now < followed_at + grace:
                pause = min(pause, followed_at + grace - now)
            elif await self._is_ended(tenant, request_id):
                return
            await wait_for(asyncio.Event(), pause)

    async def _is_ended(self, tenant: TenantId, request_id: RequestId) -> bool:
        """End the sample. Return False while the database does not answer."""
        error = Cancelled("cancelled: the client that followed this sample has left")
        try:
            async with self._runtime.database.write() as transaction:
                await self._runtime.ledger.cancel(
                    transaction, OfOperation(request_id, tenant), error, only_samples=True
                )
        except Unavailable as outage:
            log.warning("operation=%s goes on although its client has left: %s", request_id, outage.message)
            return False
        return True
