"""Resumption of samples that another sampling process has begun: their tokens are saved at its end, and found here.

A process that ends in order saves the tokens of its samples. One that dies does not; then the followers of a sample's
stream have the tokens that clients have read. They are asked for them before the sample goes on.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from contracts.errors import WeftError
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import ReadyOperation
from contracts.operations import Payload, SampleRequest, Unreadable
from contracts.sample_progress import SampleProgress, SavedProgress, decode_progress, lacks_scores
from ledger.runtime import Runtime
from ledger.wakeups import saved_tokens_topic, unsaved_tokens_topic
from store.repeat import wait_for
from tenants.sample_progress import save_progress, saved_progress
from workers.sampling.continuation import Continuation
from workers.sampling.sample_runner import History

log = logging.getLogger(__name__)

ASK_SECONDS = 3.0
"""Longest wait for a follower's tokens."""
_TOKENS_AT_ONCE = 1 << 18
"""Tokens that one transaction saves, unless one sample has more. They take PostgreSQL about a tenth of a second."""

Unfinished = tuple[ReadyOperation, Continuation, History]


class Resumption:
    """Saves and finds the progress of one process's samples."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def resume(self, operation: ReadyOperation, continuation: Continuation, history: History) -> None:
        """Give ``continuation`` and ``history`` what is saved of the sample, if anything is. Raises ``Unavailable``."""
        if not operation.has_progress:
            return
        saved = await self._saved(operation)
        if saved is not None and saved.is_stale and self._runtime.feed.is_followed((operation.lane, operation.seq_id)):
            saved = await self._asked(operation)
        if saved is None or not saved.body:
            return
        try:
            # Many long sequences take a while, for which the lease and other samples would wait.
            progress = await asyncio.to_thread(_resumed, operation.payload, continuation, saved.body)
        except ValueError as error:
            log.error("operation=%s is drawn again, its progress cannot be read: %s", operation.id, error)
            return
        history.take_up(progress)
        log.info("operation=%s goes on after %d tokens", operation.id, continuation.made)

    async def _saved(self, operation: ReadyOperation) -> SavedProgress | None:
        async with self._runtime.database.read() as session:
            return await saved_progress(session, operation.id)

    async def _asked(self, operation: ReadyOperation) -> SavedProgress | None:
        """Ask the sample's followers for their tokens, and return what is saved then."""
        with self._runtime.wakeups.listen(saved_tokens_topic(operation.id)) as event:
            self._runtime.wakeups.announce(unsaved_tokens_topic(operation.id))
            await wait_for(event, ASK_SECONDS)
        return await self._saved(operation)

    async def save(self, unfinished: Iterable[Unfinished], *, process: str) -> None:
        """Save the tokens of samples that this ``process`` leaves and has by the same claim still. Raises ``Unavailable``."""
        for some in _batches(unfinished):
            await self._save_some(some, process)

    async def save_at_end(self, unfinished: Iterable[Unfinished], *, process: str) -> list[tuple[TenantId, RequestId]]:
        """Save the tokens at the end of this process, in one try; return the samples whose tokens could not be saved.

        The next process asks their followers, as it does for a process that has died. What nobody follows is drawn again.
        """
        left = _batches(unfinished)
        try:
            while left:
                await self._save_some(left[0], process)
                del left[0]
        except WeftError as failure:
            unsaved = [(operation.tenant, operation.id) for some in left for operation, _, _ in some]
            log.warning("the tokens of %d samples could not be saved: %s", len(unsaved), failure.message)
            return unsaved
        return []

    async def _save_some(self, unfinished: Sequence[Unfinished], process: str) -> None:
        async with self._runtime.database.write() as transaction:
            ids = [operation.id for operation, _, _ in unfinished]
            mine = await self._runtime.ledger.claimed(transaction, ids, process=process)
            progresses = [
                (operation.tenant, operation.id, _progress(continuation, history))
                for operation, continuation, history in unfinished
                if mine.get(operation.id) == operation.claim
            ]
            await save_progress(transaction, progresses)


def _batches(unfinished: Iterable[Unfinished]) -> list[list[Unfinished]]:
    """Return the samples that have tokens, divided by their tokens: none is in a transaction that takes seconds."""
    batches: list[list[Unfinished]] = []
    room = 0
    for one in unfinished:
        if made := one[1].made:
            if made > room:
                batches.append([])
                room = _TOKENS_AT_ONCE
            batches[-1].append(one)
            room -= made
    return batches


def _resumed(sample: Payload | Unreadable, continuation: Continuation, body: bytes) -> SampleProgress:
    """Give ``continuation`` the progress that is saved as ``body``, and return it. Raises ``ValueError``."""
    progress = decode_progress(body)
    if isinstance(sample, SampleRequest) and lacks_scores(sample, progress.output):
        raise ValueError("it lacks scores that the sample asks for")
    continuation.resume(progress.output, progress.report.sequences, restarts=progress.restarts)
    continuation.scored_version = progress.report.scored_version
    return progress


def _progress(continuation: Continuation, history: History) -> SampleProgress:
    report = history.report(continuation)
    return SampleProgress(continuation.so_far(), report, history.first_publication, continuation.restarts)
