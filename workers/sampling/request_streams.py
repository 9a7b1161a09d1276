"""One attempt of a sample on a replica, and when there have been enough."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from contracts.errors import EngineFailure
from engine.sampling.replica import GenerateRequest, SamplerReplica
from workers.sampling.continuation import Continuation

MOST_FRUITLESS_ATTEMPTS = 8
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0


async def run_attempt(
    replica: SamplerReplica,
    continuation: Continuation,
    requests: Sequence[GenerateRequest],
    *,
    is_cut: Callable[[], bool] = lambda: False,
    on_news: Callable[[], None] = lambda: None,
    left: "asyncio.Future[None] | None" = None,
) -> EngineFailure | None:
    """Run all ``requests`` to their ends; returns one of the failures that ended any. Leaving early aborts what runs.

    A request is not begun once ``is_cut``: the replica could not have been told to cut it. ``on_news`` is called
    whenever the continuation may have new tokens. Once ``left`` is done the requests are left where they are: the
    replica gives them up soon after. Raises ``InvalidRequest`` for what the caller must change.
    """
    streams = [asyncio.create_task(_stream(replica, continuation, request, is_cut, on_news)) for request in requests]

    def leave(_: "asyncio.Future[None]") -> None:
        for stream in streams:
            stream.cancel()

    if left is not None:
        left.add_done_callback(leave)
    # Each to its own end: a failure of one request says nothing of the others.
    ends = await asyncio.gather(*streams, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, EngineFailure | asyncio.CancelledError):
            raise end
    return next((end for end in ends if isinstance(end, EngineFailure)), None)


async def _stream(
    replica: SamplerReplica,
    continuation: Continuation,
    request: GenerateRequest,
    is_cut: Callable[[], bool],
    on_news: Callable[[], None],
) -> None:
    if is_cut():
        return
    async with aclosing(replica.generate(request)) as batches:
        async for events in batches:
            stopped = [index for event in events if (index := continuation.take(request, event)) is not None]
            on_news()
            if continuation.done_with(request):
                # Leaving aborts what the replica may still make of it.
                return
            for index in stopped:
                await replica.cut(request.request_id, index)


class Patience:
    """How often a sample may fail in a row without a new token: ``MOST_FRUITLESS_ATTEMPTS`` times."""

    def __init__(self) -> None:
        self._fruitless = 0

    def note(self, failure: EngineFailure | None, *, made: int) -> float:
        """An attempt that brought ``made`` tokens has ended; returns the seconds to wait before the next one.

        Without a ``failure`` it was cut by those who will go on with it. Raises ``EngineFailure`` when it is enough.
        """
        if failure is None or made > 0:
            self._fruitless = 0
            return 0.0
        self._fruitless += 1
        if self._fruitless == MOST_FRUITLESS_ATTEMPTS:
            raise EngineFailure(
                f"the sample made no progress in {self._fruitless} attempts; the last one: {failure.message}"
            )
        return min(_FIRST_PAUSE_SECONDS * 2.0**self._fruitless, _LONGEST_PAUSE_SECONDS)
