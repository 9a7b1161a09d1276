"""``stream_sample``: a sample whose tokens come as server-sent events while they are made, across cuts and swaps."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Annotated

import orjson
from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from api.json_body import json_body
from api.services import ApiServices, Caller, Services
from api.tinker.sampling import accept_sample, sample_operation
from api.wire.schemas import AsampleRequest
from engine.contracts.ids import RequestId, TenantId
from engine.contracts.operations import SampleOutput
from tenants.models import OperationState
from workers.ledger.ledger import Ledger
from workers.ledger.operations import NewOperation, OperationStatus
from workers.ledger.token_feed import TokensMade

router = APIRouter(tags=["sampling"])

_KEEPALIVE_SECONDS = 15.0
"""Silence after which a comment is sent, so that no proxy takes the stream for dead."""


@router.post("/stream_sample", response_class=StreamingResponse)
async def stream_sample(
    caller: Caller, services: Services, body: Annotated[AsampleRequest, json_body(AsampleRequest)]
) -> StreamingResponse:
    """``asample`` as a stream: ``accepted``, any number of ``tokens``, then ``done`` or ``error``.

    ``done`` repeats every sequence whole: a client that came late, or lost the stream and asked again with the same
    ``seq_id``, has missed nothing. Raises as ``asample``.
    """
    operation, obstacle = await sample_operation(services, caller, body)
    events = _events(services, caller, operation, obstacle)
    # The first event is made before the answer begins, so that a refusal is an answer with its own status.
    first = await anext(events)
    return StreamingResponse(
        _after(first, events), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


async def _events(
    services: ApiServices, caller: TenantId, operation: NewOperation, obstacle: Exception | None
) -> AsyncIterator[bytes]:
    with services.feed.follow((operation.lane, operation.seq_id)) as queue:
        request_id = await accept_sample(services, operation, obstacle)
        yield _event("accepted", {"request_id": request_id})
        ending = asyncio.create_task(_final(services.ledger, caller, request_id))
        try:
            while not ending.done() or not queue.empty():
                getting = asyncio.create_task(queue.get())
                await asyncio.wait({getting, ending}, timeout=_KEEPALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    for event in _tokens(getting.result()):
                        yield event
                    continue
                getting.cancel()
                if not ending.done():
                    yield b": still here\n\n"
            yield await _end(services.ledger, caller, await ending)
        finally:
            ending.cancel()


async def _final(ledger: Ledger, caller: TenantId, request_id: RequestId) -> OperationStatus:
    while True:
        status = await ledger.wait_until_final(caller, request_id, seconds=_KEEPALIVE_SECONDS)
        if status.state is not OperationState.PENDING:
            return status


def _tokens(made: Iterable[TokensMade]) -> Iterable[bytes]:
    for part in made:
        yield _event(
            "tokens",
            {"sequence": part.sequence, "version": part.version, "tokens": part.tokens, "logprobs": part.logprobs},
        )


async def _end(ledger: Ledger, caller: TenantId, status: OperationStatus) -> bytes:
    if status.state is OperationState.FAILED:
        return _event("error", {"error": status.error_message or "failed", "code": status.error_code})
    result = await ledger.result(caller, status)
    if not isinstance(result, SampleOutput):
        return _event("error", {"error": "the result was kept for its grace time and is gone", "code": "future_gone"})
    sequences = [
        {
            "stop_reason": sequence.stop_reason,
            "tokens": sequence.tokens.tolist(),
            "logprobs": sequence.logprobs.tolist(),
        }
        for sequence in result.sequences
    ]
    return _event("done", {"request_id": status.id, "sequences": sequences})


def _event(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
