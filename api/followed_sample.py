"""A sample that its caller waits for on one connection, with its tokens as they are made."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from api.services import ApiServices
from api.tinker.sampling import accept_sample
from contracts.errors import FutureGone
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation, OperationState, OperationStatus
from contracts.operations import SampleOutput
from ledger.ledger import Ledger
from ledger.token_feed import TokensMade

SILENCE_SECONDS = 15.0
"""After so long without a token, followers hear that the sample goes on: no proxy takes the connection for dead."""


class FollowedSample:
    """An accepted sample. Tokens may have been missed, by a client that comes back: ``output`` has all of them."""

    def __init__(
        self,
        ledger: Ledger,
        caller: TenantId,
        request_id: RequestId,
        queue: "asyncio.Queue[Sequence[TokensMade]]",
        ending: "asyncio.Task[OperationStatus]",
    ) -> None:
        self.request_id = request_id
        self._ledger = ledger
        self._caller = caller
        self._queue = queue
        self._ending = ending

    async def tokens(self) -> AsyncIterator[Sequence[TokensMade]]:
        """What is made, until the sample has ended; an empty part after ``SILENCE_SECONDS`` without any."""
        while not self._ending.done() or not self._queue.empty():
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    made = await self._queue.get()
            except TimeoutError:
                yield ()
                continue
            if made:
                yield made

    async def status(self) -> OperationStatus:
        """How it ended, waited for."""
        return await asyncio.shield(self._ending)

    async def output(self) -> SampleOutput:
        """The result of a sample that ended well. Raises ``FutureGone`` once that is pruned."""
        result = await self._ledger.result(self._caller, await self.status())
        if not isinstance(result, SampleOutput):
            raise FutureGone("the result was kept for its grace time and is gone")
        return result


@asynccontextmanager
async def followed(
    services: ApiServices, caller: TenantId, operation: NewOperation, obstacle: Exception | None
) -> AsyncIterator[FollowedSample]:
    """Accept the sample, or find its earlier self, and follow it. Raises as ``accept_sample``."""
    with services.feed.follow((operation.lane, operation.seq_id)) as queue:
        request_id = await accept_sample(services, operation, obstacle)
        ending = asyncio.create_task(_final(services.ledger, caller, request_id))
        # Who waits for tokens is woken by the end, too.
        ending.add_done_callback(lambda _: queue.put_nowait(()))
        try:
            yield FollowedSample(services.ledger, caller, request_id, queue, ending)
        finally:
            ending.cancel()


async def _final(ledger: Ledger, caller: TenantId, request_id: RequestId) -> OperationStatus:
    while True:
        status = await ledger.wait_until_final(caller, request_id, seconds=SILENCE_SECONDS)
        if status.state is not OperationState.PENDING:
            return status
