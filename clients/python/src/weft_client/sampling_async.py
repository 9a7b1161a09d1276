"""Gates, samples and operations with asyncio. ``weft_client.sampling_sync`` is made of this file (``make_sync.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING

from weft_client import calls
from weft_client.bodies import sample_body
from weft_client.calls import TINKER
from weft_client.errors import BadRequest, OutcomeUnknown, WeftClientError
from weft_client.transport_async import AsyncTransport

if TYPE_CHECKING:
    from weft_client import models
    from weft_client.streams import Event

_PAGE = 1000
_PAGE_OF_WORK = 200
_HOLD_SECONDS = 30.0
"""Longest wait at the beginning of a block for the samples in flight."""
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 2.0
"""Seconds between two looks at a gate, which double each time: each look counts to the tenant's rate of requests."""
_MOST_ENDS = 3
"""Times that a block's end is tried whose answer is lost."""


class AsyncGates:
    """Gates of adapters: pause, resume, and the version that live samplers follow."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def state(self, run: str) -> models.GateState:
        """Describe the gate of the run's adapter."""
        return await self._transport.send(calls.gate(run))

    async def list(self) -> AsyncIterator[models.GateState]:
        """Yield the gates of the tenant's adapters, those of the newest runs first, page by page."""
        cursor: str | None = None
        offset = 0
        while True:
            asked = calls.adapters(limit=_PAGE, cursor=cursor, offset=None if cursor else offset)
            page = await self._transport.send(asked)
            for state in page.adapters:
                yield state
            offset += _PAGE
            # Services of before the cursor tell the number alone.
            if page.next_cursor is None and (cursor is not None or offset >= page.cursor.total_count):
                return
            cursor = page.next_cursor

    async def pause(
        self,
        run: str,
        *,
        mode: models.GateMode = "keep",
        reason: str | None = None,
        ttl: float | None = None,
        wait_seconds: float = 30.0,
        clear_cache: bool = False,
        generation: int | None = None,
    ) -> models.GateState:
        """Pause sampling from the adapter, for ``ttl`` seconds at most; wait up to ``wait_seconds`` for it to hold.

        With ``generation``, pause only a gate that is still at it. Raises ``OutcomeUnknown`` where that answer is lost.
        """
        return await self._transport.send(
            calls.pause(
                run,
                mode=mode,
                reason=reason,
                ttl=ttl,
                wait_seconds=wait_seconds,
                clear_cache=clear_cache,
                generation=generation,
            )
        )

    async def resume(self, run: str, *, generation: int | None = None) -> models.GateState:
        """End a pause; with ``generation`` only that one, not a later one of somebody else.

        Raises ``OutcomeUnknown`` where the answer is lost: sent again, it might end a later pause.
        """
        return await self._transport.send(calls.resume(run, generation=generation))

    @asynccontextmanager
    async def paused(
        self, run: str, *, mode: models.GateMode = "keep", reason: str | None = None, ttl: float | None = None
    ) -> AsyncIterator[models.GateState]:
        """Pause the adapter within the block. At its end, after an error too, this pause ends; one of somebody else goes on."""
        # Answered at once: whatever ends the wait for samples in flight, this pause is known and ends, too.
        state = await self.pause(run, mode=mode, reason=reason, ttl=ttl, wait_seconds=0)
        try:
            yield await self._held(run, state)
        finally:
            await self._end(run, state.generation)

    async def _held(self, run: str, paused: models.GateState) -> models.GateState:
        """Return the gate's state once nothing is in flight, somebody has changed it, or ``_HOLD_SECONDS`` are over."""
        state, end, delay = paused, monotonic() + _HOLD_SECONDS, _FIRST_LOOK
        while state.state == "pausing" and state.generation == paused.generation and (rest := end - monotonic()) > 0:
            await asyncio.sleep(min(delay, rest))
            delay = min(2 * delay, _LONGEST_LOOK)
            try:
                state = await self._transport.send(calls.gate(run, is_tried_once=True))
            except WeftClientError as failure:
                # The pause is made. A look that the service puts off only takes of the time for looks.
                if not failure.retryable:
                    raise
                delay = max(delay, failure.retry_after or 0.0)
        return state

    async def _end(self, run: str, generation: int) -> None:
        for attempt in range(1, _MOST_ENDS + 1):
            try:
                await self.resume(run, generation=generation)
                return
            except (BadRequest, OutcomeUnknown) as failure:
                if (await self.state(run)).generation != generation:
                    return
                if isinstance(failure, BadRequest) or attempt == _MOST_ENDS:
                    raise

    async def reload(self, run: str, *, path: str | None = None) -> models.Reloaded:
        """Have live samplers of the run follow the checkpoint ``path``, by default the newest."""
        return await self._transport.send(calls.reload(run, path=path))


class AsyncSamples:
    """Samples: streams, reports, and how old a live sampler's may become."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def stream(
        self,
        sampler: str,
        prompt: list[int],
        *,
        seq_id: int,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        stop: list[int] | None = None,
    ) -> AsyncIterator[Event]:
        """Draw a sample and yield its tokens as they are made, then all of it.

        ``sampler`` is a sampling session's id, and ``seq_id`` a number that none of its samples had. A stream that breaks
        off goes on with the next token. Where the service draws the sample again, as it does for ``on_stale="restart"``,
        ``Tokens`` replace earlier ones from their ``start`` on. Raises ``WeftClientError``.
        """
        body = sample_body(
            sampler,
            prompt,
            seq_id=seq_id,
            num_samples=num_samples,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop=stop,
        )
        async for event in self._transport.stream(f"{TINKER}/stream_sample", body):
            yield event

    async def finished(self) -> AsyncIterator[models.SampleSummary]:
        """Yield the samples that have ended, newest first, page by page, as long as their results are kept."""
        after: str | None = None
        while True:
            page = await self._transport.send(calls.samples(limit=_PAGE_OF_WORK, after=after))
            for sample in page.samples:
                yield sample
            if (after := page.next) is None:
                return

    async def report(self, request: str) -> models.SampleInfo:
        """Report on a finished sample: the weights that made each token, the replicas, the time."""
        return await self._transport.send(calls.report(request))

    async def waiting(self, request: str) -> models.WaitingInfo:
        """Tell why the sample has not ended, behind what it waits, and for how long at most."""
        return await self._transport.send(calls.request_waiting(request))

    async def staleness(self, sampler: str) -> models.StalenessInfo:
        """Describe how far a live sampler's samples may fall behind."""
        return await self._transport.send(calls.staleness(sampler))

    async def bound_staleness(
        self,
        sampler: str,
        *,
        max_version_lag: int | None,
        on_stale: models.OnStale = "fail",
        swap_policy: models.SwapPolicy | None = None,
    ) -> models.StalenessInfo:
        """Set how far a live sampler's samples may fall behind, and what a publication does to them; None lifts either."""
        return await self._transport.send(
            calls.bound_staleness(sampler, max_version_lag=max_version_lag, on_stale=on_stale, swap_policy=swap_policy)
        )


class AsyncOperations:
    """Operations of the tenant: what waits, and what has failed."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(
        self, *, state: models.OperationState = "pending", lane: str | None = None, kind: str | None = None
    ) -> AsyncIterator[models.OwnOperation]:
        """Yield operations page by page: pending ones oldest first, with why they wait; others newest first."""
        after: str | None = None
        while True:
            page = await self._transport.send(
                calls.operations(state=state, lane=lane, kind=kind, limit=_PAGE_OF_WORK, after=after)
            )
            for operation in page.operations:
                yield operation
            if (after := page.next) is None:
                return


class AsyncClientExceptions:
    """Exceptions that ended clients' scripts, as the SDK told them."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(
        self, *, session: str | None = None, run: str | None = None
    ) -> AsyncIterator[models.ClientExceptionInfo]:
        """Yield exceptions, newest first, page by page: all that are kept, or those of a session, or of a run's session."""
        after: int | None = None
        while True:
            page = await self._transport.send(
                calls.client_exceptions(session=session, run=run, limit=_PAGE_OF_WORK, after=after)
            )
            for one in page.exceptions:
                yield one
            if (after := page.next) is None:
                return
