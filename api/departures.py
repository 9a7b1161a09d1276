"""Departures: ends the samples that were followed on a connection whose client has gone.

A sample that a repeat of the request would find again waits for the client for ``reconnect_grace`` first. No sample is
ended when the process itself ends: its clients repeat their requests elsewhere.
"""

import asyncio
import logging

from contracts.errors import Cancelled, WeftError
from contracts.ids import RequestId, TenantId
from ledger.cancellation import OfOperation
from ledger.runtime import Runtime
from ledger.token_feed import FeedKey
from store.repeat import wait_for

log = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0
"""Time between two looks at a sample that somebody else may follow."""


class Departures:
    """Samples of one API process whose clients have gone."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._grace = runtime.settings.reconnect_grace.total_seconds()
        self._tasks: set[asyncio.Task[None]] = set()

    def left(self, key: FeedKey, tenant: TenantId, request_id: RequestId, *, may_return: bool) -> None:
        """End the sample soon; with ``may_return`` only if nobody follows it again within the grace time."""
        if self._runtime.wakeups.is_closed:
            return
        task = asyncio.create_task(self._end(key, tenant, request_id, may_return), name=f"left {request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, key: FeedKey, tenant: TenantId, request_id: RequestId, may_return: bool) -> None:
        if may_return:
            await wait_for(asyncio.Event(), self._grace)
        while self._runtime.feed.is_followed(key) and not self._runtime.wakeups.is_closed:
            # Whoever follows it may have left before: another process tells so only some time later.
            await wait_for(asyncio.Event(), _LOOK_SECONDS)
        if self._runtime.wakeups.is_closed:
            return
        error = Cancelled("cancelled: the client that followed this sample has left")
        try:
            async with self._runtime.database.write() as transaction:
                await self._runtime.ledger.cancel(
                    transaction, OfOperation(request_id, tenant), error, only_samples=True
                )
        except WeftError as failure:
            log.warning("operation=%s goes on although its client has left: %s", request_id, failure.message)
