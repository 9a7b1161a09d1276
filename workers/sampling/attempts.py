"""Runs a sample on a replica, from where it is, until it is whole or the replica gets nowhere any more."""

import asyncio
from contextlib import aclosing
from itertools import count

from engine.contracts.errors import EngineFailure
from engine.contracts.operations import SampleOutput
from engine.sampling.replica import AdapterVersion, GenerateRequest, SamplerReplica
from workers.sampling.continuation import Continuation

MOST_FRUITLESS_ATTEMPTS = 8


async def run_sample(
    replica: SamplerReplica, continuation: Continuation, adapter: AdapterVersion | None
) -> SampleOutput:
    """Draw ``continuation`` to its end; leaving early aborts what runs.

    Raises ``InvalidRequest`` for what the caller must change, and ``EngineFailure`` after ``MOST_FRUITLESS_ATTEMPTS``
    in a row that brought no new token.
    """
    fruitless = 0
    for attempt in count(1):
        before = continuation.made
        failure = await _attempt(replica, continuation, continuation.requests(adapter, attempt))
        if continuation.finished:
            break
        fruitless = 0 if continuation.made > before else fruitless + 1
        if fruitless == MOST_FRUITLESS_ATTEMPTS:
            cause = failure.message if failure else "the replica cut it"
            raise EngineFailure(f"the sample made no progress in {fruitless} attempts; the last one: {cause}")
    return continuation.output()


async def _attempt(
    replica: SamplerReplica, continuation: Continuation, requests: list[GenerateRequest]
) -> EngineFailure | None:
    """Run all ``requests`` to their ends; returns one of the failures that ended any. Raises what is no such failure."""
    # Each to its own end: a failure of one request says nothing of the others.
    ends = await asyncio.gather(
        *(_stream(replica, continuation, request) for request in requests), return_exceptions=True
    )
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, EngineFailure):
            raise end
    return next((end for end in ends if isinstance(end, EngineFailure)), None)


async def _stream(replica: SamplerReplica, continuation: Continuation, request: GenerateRequest) -> None:
    async with aclosing(replica.generate(request)) as batches:
        async for events in batches:
            stopped = [index for event in events if (index := continuation.take(request, event)) is not None]
            if continuation.done_with(request):
                # Leaving aborts what the replica may still make of it.
                return
            for index in stopped:
                await replica.cut(request.request_id, index)
