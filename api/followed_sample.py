"""A sample that its client follows on one connection, token by token, until it ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from api.sample_submission import SampleSubmission, accept_sample
from api.services import ApiServices
from contracts.errors import FutureGone, Unavailable
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import OperationState, OperationStatus
from contracts.operations import SampleOutput
from ledger.ledger import Ledger
from ledger.runtime import Runtime
from ledger.token_feed import TokensMade
from tenants.sessions import keep_session_alive

_BEATS = 4
"""Times that a followed sample's session is kept alive within its time limit."""
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
        """Wait for the end of the sample and return its final status. Raises ``Unavailable`` when this process ends first."""
        status = await asyncio.shield(self._ending)
        if status.state is OperationState.PENDING:
            raise Unavailable("this server is ending; send the request again, and it finds its sample")
        return status

    async def output(self) -> SampleOutput:
        """Return the result of a sample that succeeded. Raises ``Unavailable``, and ``FutureGone`` for a pruned result."""
        result = await self._ledger.result(self._caller, await self.status())
        if not isinstance(result, SampleOutput):
            raise FutureGone("the result was kept for its grace time and is gone; send a new request")
        return result


@asynccontextmanager
async def followed(services: ApiServices, submission: SampleSubmission) -> AsyncIterator[FollowedSample]:
    """Accept the sample, or find the one that it repeats, and follow it. Raises as ``accept_sample``.

    Leaving before the sample has ended ends it (``api.departures``).
    """
    ledger, key = services.runtime.ledger, (submission.sampler, submission.seq_id)
    with services.runtime.feed.follow(key) as queue:
        request_id = await accept_sample(services, submission)
        ending = asyncio.create_task(_final(services.runtime, submission, request_id))
        # An empty part wakes the reader of the queue when the sample ends.
        ending.add_done_callback(lambda _: queue.put_nowait(()))
        try:
            yield FollowedSample(ledger, submission.tenant, request_id, queue, ending)
        finally:
            if not ending.done():
                services.departures.left(key, submission.tenant, request_id, may_return=submission.may_return)
            ending.cancel()


async def _final(runtime: Runtime, submission: SampleSubmission, request_id: RequestId) -> OperationStatus:
    """Return the sample's final status, or the pending one when this process ends.

    Meanwhile the sample's session counts as alive: a client that follows is not silent.
    """
    ledger, clock = runtime.ledger, runtime.clock
    beat = runtime.settings.session_timeout / _BEATS
    due = clock() + beat
    while True:
        status = await ledger.wait_until_final(submission.tenant, request_id, seconds=SILENCE_SECONDS)
        # A process that ends answers at once. Its waits end at once, too, so asking again would not wait.
        if status.state is not OperationState.PENDING or runtime.wakeups.is_closed:
            return status
        if clock() >= due:
            async with runtime.database.write_one() as session:
                await keep_session_alive(session, submission.sampler, clock)
            due = clock() + beat
