"""``stream_sample``: a sample whose tokens come as server-sent events while they are made, across cuts and swaps."""

from collections.abc import AsyncIterator, Iterable
from typing import Annotated

import orjson
from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from api.followed_sample import FollowedSample, followed
from api.services import ApiServices, Caller, Services
from api.tinker.sampling import sample_operation
from api.wire.json_body import json_body
from api.wire.schemas import AsampleRequest
from contracts.errors import FutureGone
from contracts.ids import TenantId
from contracts.ledger_records import NewOperation, OperationState
from ledger.token_feed import TokensMade

router = APIRouter(tags=["sampling"])


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
    async with followed(services, caller, operation, obstacle) as sample:
        yield _event("accepted", {"request_id": sample.request_id})
        async for made in sample.tokens():
            if not made:
                yield b": still here\n\n"
            for event in _tokens(made):
                yield event
        yield await _end(sample)


def _tokens(made: Iterable[TokensMade]) -> Iterable[bytes]:
    for part in made:
        yield _event(
            "tokens",
            {
                "sequence": part.sequence,
                "start": part.start,
                "version": part.version,
                "tokens": part.tokens,
                "logprobs": part.logprobs,
            },
        )


async def _end(sample: FollowedSample) -> bytes:
    status = await sample.status()
    if status.state is OperationState.FAILED:
        return _event("error", {"error": status.error_message or "failed", "code": status.error_code})
    try:
        result = await sample.output()
    except FutureGone as gone:
        return _event("error", {"error": gone.message, "code": gone.code})
    sequences = [
        {
            "stop_reason": sequence.stop_reason,
            "tokens": sequence.tokens.tolist(),
            "logprobs": sequence.logprobs.tolist(),
        }
        for sequence in result.sequences
    ]
    return _event("done", {"request_id": sample.request_id, "sequences": sequences})


def _event(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
