"""A sample that its client follows on one connection, token by token, until it ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from api.sample_submission import SampleSubmission, accept_sample
from api.services import ApiServices
from contracts.errors import FutureGone
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import OperationState, OperationStatus
from contracts.operations import SampleOutput
from ledger.ledger import Ledger
from ledger.token_feed import TokensMade

SILENCE_SECONDS = 15.0
"""Longest time without a message to the client: a proxy may cut a connection that is silent for longer."""


class FollowedSample:
    """An accepted sample and the feed of its tokens.

    A client that reconnects may have missed tokens of the feed; ``output`` has every token.
    """

    def __init__(
        self,
        ledger: Ledger,
        caller: TenantId,
        request_id: RequestId,
        queue: "asyncio.Queue[Sequence[TokensMade]]",
        ending: "asyncio.Task[OperationStatus]",
    ) -> None:
        """``queue`` receives the feed, ``ending`` returns the final status."""
        self.request_id = request_id
        self._ledger = ledger
        self._caller = caller
        self._queue = queue
        self._ending = ending

    async def tokens(self) -> AsyncIterator[Sequence[TokensMade]]:
        """Yield tokens as they are made, until the sample has ended; an empty part after ``SILENCE_SECONDS`` of silence."""
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
        """Wait for the end of the sample and return its final status."""
        return await asyncio.shield(self._ending)

    async def output(self) -> SampleOutput:
        """Return the result of a sample that succeeded. Raises ``FutureGone`` once the result is pruned."""
        result = await self._ledger.result(self._caller, await self.status())
        if not isinstance(result, SampleOutput):
            raise FutureGone("the result was kept for its grace time and is gone; send a new request")
        return result


@asynccontextmanager
async def followed(services: ApiServices, submission: SampleSubmission) -> AsyncIterator[FollowedSample]:
    """Accept the sample, or find the one that it repeats, and follow it. Raises as ``accept_sample``."""
    ledger = services.runtime.ledger
    with services.runtime.feed.follow((submission.sampler, submission.seq_id)) as queue:
        request_id = await accept_sample(services, submission)
        ending = asyncio.create_task(_final(ledger, submission.tenant, request_id))
        # An empty part wakes the reader of the queue when the sample ends.
        ending.add_done_callback(lambda _: queue.put_nowait(()))
        try:
            yield FollowedSample(ledger, submission.tenant, request_id, queue, ending)
        finally:
            ending.cancel()


async def _final(ledger: Ledger, caller: TenantId, request_id: RequestId) -> OperationStatus:
    while True:
        status = await ledger.wait_until_final(caller, request_id, seconds=SILENCE_SECONDS)
        if status.state is not OperationState.PENDING:
            return status
