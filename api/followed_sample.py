"""A sample that its client follows on one connection, token by token, until it ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from time import monotonic

from api.sample_submission import SampleSubmission, prepared_samples
from api.services import ApiServices
from api.token_order import TokenOrder
from contracts.errors import FutureGone, Unavailable, WeftError
from contracts.ids import RequestId
from contracts.ledger_records import OperationState, OperationStatus
from contracts.operations import SampleOutput
from contracts.sample_progress import lacks_scores
from ledger.runtime import Runtime
from ledger.token_feed import TokensMade
from ledger.wakeups import operation_topic, saved_tokens_topic, unsaved_tokens_topic
from store.repeat import wait_for
from tenants.rights import blocked
from tenants.sample_progress import complete_progress
from tenants.sessions import keep_session_alive

log = logging.getLogger(__name__)

_BEATS = 4
"""Times that a followed sample's session is kept alive within its time limit."""
_ASKED_AGAIN_SECONDS = 1.0
"""Time after which tokens that are still missing are asked for once more."""
_OUTAGE_SECONDS = 1.0
"""Time between two looks at a sample while the database does not answer."""
SILENCE_SECONDS = 15.0
"""Longest time without a message to the client: a proxy may cut a connection that is silent for longer."""


class FollowedSample:
    """An accepted sample and the feed of its tokens."""

    def __init__(
        self,
        runtime: Runtime,
        submission: SampleSubmission,
        request_id: RequestId,
        queue: "asyncio.Queue[Sequence[TokensMade]]",
        ending: "asyncio.Task[OperationStatus]",
    ) -> None:
        """``queue`` receives the feed, ``ending`` returns the final status."""
        self.request_id = request_id
        self._runtime = runtime
        self._submission = submission
        self._queue = queue
        self._ending = ending
        self._order = TokenOrder(submission.sample.num_samples)
        self._ready: list[TokensMade] = []
        self._asked: dict[int, tuple[int, float]] = {}
        """Tokens of each sequence after which others were asked for, and monotonic seconds until they are again."""

    async def tokens(self) -> AsyncIterator[Sequence[TokensMade]]:
        """Yield tokens as they are made, until the sample has ended; an empty part after ``SILENCE_SECONDS`` of silence.

        No token is left out between two others. Tokens that the feed has lost come late, at the latest with ``output``.
        """
        while True:
            self._receive()
            if self._ready:
                made, self._ready = self._ready, []
                yield made
            elif self._ending.done():
                return
            else:
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        self._take(await self._queue.get())
                except TimeoutError:
                    yield ()

    def _receive(self) -> None:
        """Take in everything that the feed has brought."""
        while not self._queue.empty():
            self._take(self._queue.get_nowait())

    def _take(self, made: Sequence[TokensMade]) -> None:
        self._ready += self._order.take(made)
        if lacking := {sequence: heard for sequence, heard in self._order.gaps.items() if self._asks(sequence, heard)}:
            self._runtime.feed.ask_again(self._submission.key, lacking)

    def _asks(self, sequence: int, heard: int) -> bool:
        """Return whether to ask for the tokens after the first ``heard`` now, and note that it is done.

        Parts that were on their way when they were asked for tell of the same gap.
        """
        now = monotonic()
        asked, until = self._asked.get(sequence, (-1, now))
        if asked == heard and now < until:
            return False
        self._asked[sequence] = (heard, now + _ASKED_AGAIN_SECONDS)
        return True

    async def hand_over(self) -> None:
        """Save the tokens for the next sampling process whenever the sample's process has died; until cancelled."""
        with self._runtime.wakeups.listen(unsaved_tokens_topic(self.request_id)) as asked:
            while await wait_for(asked, None):
                try:
                    await self._save()
                except WeftError as failure:
                    log.warning("operation=%s is drawn again from its start: %s", self.request_id, failure.message)

    async def _save(self) -> None:
        self._receive()
        progress = self._order.progress()
        # The feed has only tokens and their logprobs.
        if progress.output.drawn and not lacks_scores(self._submission.sample, progress.output):
            async with self._runtime.database.write() as transaction:
                await complete_progress(transaction, self._submission.tenant, self.request_id, progress)
        self._runtime.wakeups.announce(saved_tokens_topic(self.request_id))

    async def status(self) -> OperationStatus:
        """Wait for the end of the sample and return its final status.

        Raises ``Unavailable`` when this process ends first, ``Suspended`` when the tenant is blocked first.
        """
        status = await asyncio.shield(self._ending)
        if status.state is OperationState.PENDING:
            raise Unavailable("this server is ending; send the request again, and it finds its sample")
        return status

    async def output(self) -> SampleOutput:
        """Return the result of a sample that succeeded. Raises ``Unavailable``, and ``FutureGone`` for a pruned result."""
        result = await self._runtime.ledger.result(self._submission.tenant, await self.status())
        if not isinstance(result, SampleOutput):
            raise FutureGone("the result was kept for its grace time and is gone; send a new request")
        return result


@asynccontextmanager
async def followed(services: ApiServices, submission: SampleSubmission) -> AsyncIterator[FollowedSample]:
    """Accept the sample, or find the one that it repeats, and follow it, as ``all_followed``."""
    async with all_followed(services, [submission]) as (sample,):
        yield sample


@asynccontextmanager
async def all_followed(
    services: ApiServices, submissions: Sequence[SampleSubmission]
) -> AsyncIterator[list[FollowedSample]]:
    """Accept the samples of one request, or find those that it repeats, and follow them. Raises as ``accept_samples``.

    Leaving before a sample has ended ends it (``api.departures``), also leaving while it is accepted.
    """
    with ExitStack() as stack:
        # Before they are accepted: no token is made that the feed does not bring.
        queues = [stack.enter_context(services.runtime.feed.follow(one.key)) for one in submissions]
        # Packing them is this request's work, and counts to its tenant's time; a task's would not.
        accepting = asyncio.create_task(await prepared_samples(services, submissions))
        try:
            accepted = await asyncio.shield(accepting)
        except asyncio.CancelledError:
            services.departures.left_early(accepting, partial(_leave, services, submissions))
            raise
        samples = []
        for submission, request_id, queue in zip(submissions, accepted, queues, strict=True):
            samples.append(stack.enter_context(_followed(services, submission, request_id, queue)))
        yield samples


@contextmanager
def _followed(
    services: ApiServices,
    submission: SampleSubmission,
    request_id: RequestId,
    queue: "asyncio.Queue[Sequence[TokensMade]]",
) -> Iterator[FollowedSample]:
    ending = asyncio.create_task(_final_unless_blocked(services, submission, request_id))
    # An empty part wakes the reader of the queue when the sample ends.
    ending.add_done_callback(lambda _: queue.put_nowait(()))
    sample = FollowedSample(services.runtime, submission, request_id, queue, ending)
    handing_over = asyncio.create_task(sample.hand_over())
    try:
        yield sample
    finally:
        if not ending.done() or ending.exception() is not None:
            _leave(services, [submission], [request_id])
        ending.cancel()
        handing_over.cancel()


def _leave(services: ApiServices, submissions: Sequence[SampleSubmission], accepted: Sequence[RequestId]) -> None:
    for one, request_id in zip(submissions, accepted, strict=True):
        services.departures.left(one.key, one.tenant, request_id, may_return=one.may_return)


async def _final_unless_blocked(
    services: ApiServices, submission: SampleSubmission, request_id: RequestId
) -> OperationStatus:
    """Return as ``_final``. Raises ``Suspended`` once the tenant is blocked: its client may follow no longer."""
    ended_keys, tenant = services.ended_keys, submission.tenant
    try:
        async with asyncio.timeout(None) as patience:
            now = asyncio.get_running_loop().time
            with ended_keys.when_blocked(tenant, lambda: patience.reschedule(now())):
                return await _final(services.runtime, submission, request_id)
    except TimeoutError:
        if not patience.expired():
            raise
        raise blocked(ended_keys.reason_of_block(tenant)) from None


async def _final(runtime: Runtime, submission: SampleSubmission, request_id: RequestId) -> OperationStatus:
    """Return the sample's final status, or the pending one when this process ends. An outage of the database only takes time.

    Meanwhile the sample's session counts as alive: a client that follows is not silent. A sample logs its first failed look
    alone: many samples would else log a line a second each.
    """
    beat = min(runtime.settings.session_timeout, runtime.settings.sample_silence) / _BEATS
    due, is_told = runtime.clock() + beat, False
    while True:
        try:
            status = await runtime.ledger.wait_until_final(submission.tenant, request_id, seconds=SILENCE_SECONDS)
            # A process that ends answers at once. Its waits end at once, too, so asking again would not wait.
            if status.state is not OperationState.PENDING or runtime.wakeups.is_closed:
                return status
            if runtime.clock() >= due:
                async with runtime.database.write_one() as session:
                    await keep_session_alive(session, submission.sampler, runtime.clock)
                due = runtime.clock() + beat
        except Unavailable as outage:
            if runtime.wakeups.is_closed:
                raise
            if not is_told:
                log.warning("operation=%s is followed on: %s", request_id, outage.message)
                is_told = True
            with runtime.wakeups.listen(operation_topic(request_id)) as event:
                await wait_for(event, _OUTAGE_SECONDS)
