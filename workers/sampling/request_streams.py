"""Streaming of one attempt: a replica's tokens go into the sample's continuation until every request has ended."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from contracts.errors import EngineFailure
from engine.sampling.replica import GenerateRequest, SamplerReplica
from workers.sampling.continuation import Continuation


async def stream_requests(
    replica: SamplerReplica,
    continuation: Continuation,
    requests: Sequence[GenerateRequest],
    *,
    is_cut: Callable[[], bool] = lambda: False,
    on_tokens: Callable[[], None] = lambda: None,
    left: "asyncio.Future[None] | None" = None,
) -> EngineFailure | None:
    """Stream ``requests`` into ``continuation`` until all have ended. Return the failure of one of them, if any failed.

    - ``is_cut``: once true, no request begins any more. A request that begins later would miss the cut.
    - ``on_tokens`` is called whenever the continuation may have new tokens.
    - ``left``: once done, the streams are closed without waiting for the replica, which aborts the requests soon after.

    Being cancelled aborts the requests, too. Raises ``InvalidRequest`` for a mistake that the caller must correct.
    """
    streams = [
        asyncio.create_task(_stream_request(replica, continuation, request, is_cut, on_tokens)) for request in requests
    ]

    def close_streams(_: "asyncio.Future[None]") -> None:
        for stream in streams:
            stream.cancel()

    if left is not None:
        left.add_done_callback(close_streams)
    # A failure of one request says nothing about the others, so each of them runs to its own end.
    ends = await asyncio.gather(*streams, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, EngineFailure | asyncio.CancelledError):
            raise end
    return next((end for end in ends if isinstance(end, EngineFailure)), None)


async def _stream_request(
    replica: SamplerReplica,
    continuation: Continuation,
    request: GenerateRequest,
    is_cut: Callable[[], bool],
    on_tokens: Callable[[], None],
) -> None:
    if is_cut():
        return
    async with aclosing(replica.generate(request)) as batches:
        async for events in batches:
            stopped = [index for event in events if (index := continuation.take(request, event)) is not None]
            on_tokens()
            if continuation.has_ended(request):
                # Closing the stream aborts the sequences that the replica still draws for this request.
                return
            for index in stopped:
                await replica.cut(request.request_id, index)
