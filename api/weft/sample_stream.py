"""``stream_sample``: a sample whose tokens are sent as server-sent events while they are made."""

from collections.abc import AsyncIterator, Iterable
from typing import Annotated

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from api.authentication import SampleCaller
from api.followed_sample import FollowedSample, followed
from api.json_body import json_body
from api.request_body import off_loop
from api.route_bounds import PROMPT_BODY, Holding, bounded
from api.sample_submission import SampleSubmission, tinker_submission
from api.services import ApiServices, Services
from api.wire.json_counts import DATA
from api.wire.tinker_requests import AsampleRequest
from contracts.errors import WeftError
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import OperationState
from contracts.operations import SampleOutput
from ledger.token_feed import TokensMade

router = APIRouter(tags=["sampling"])


@router.post("/stream_sample", response_class=StreamingResponse)
@bounded(body=PROMPT_BODY, holding=Holding.STREAM, goes_on=True)
async def stream_sample(
    caller: SampleCaller,
    services: Services,
    request: Request,
    body: Annotated[AsampleRequest, json_body(AsampleRequest, DATA)],
) -> StreamingResponse:
    """Sample as with ``asample``, and stream the tokens while they are made.

    The events are ``accepted``, any number of ``tokens``, then ``done`` or ``error``. ``done`` repeats every sequence
    whole, so a client that lost the stream and sends the request again with the same ``seq_id`` misses nothing; it has
    ``WEFT_RECONNECT_GRACE`` to do so, then the sample is cancelled. A pause or a new version of the adapter does not end
    the stream. Raises as ``asample``.
    """
    events = _events(services, await tinker_submission(services, caller, request, body))
    # The first event is made before the response begins, so that a refusal has a status of its own.
    first = await anext(events)
    return StreamingResponse(
        _after(first, events), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


async def _events(services: ApiServices, submission: SampleSubmission) -> AsyncIterator[bytes]:
    async with followed(services, submission) as sample:
        yield _event("accepted", {"request_id": sample.request_id})
        async for made in sample.tokens():
            if not made:
                yield b": still here\n\n"
            for event in _tokens(made):
                yield event
        yield await _end(services, submission.tenant, sample)


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


async def _end(services: ApiServices, caller: TenantId, sample: FollowedSample) -> bytes:
    try:
        status = await sample.status()
        if status.state is OperationState.FAILED:
            return _failure(status.error_message or "failed", status.error_code, retryable=False)
        result = await sample.output()
    except WeftError as error:
        return _failure(error.message, error.code, retryable=error.retryable)
    size = sum(sequence.tokens.nbytes + sequence.logprobs.nbytes for sequence in result.sequences)
    return await off_loop(services, caller, size, _done, sample.request_id, result)


def _done(request_id: RequestId, result: SampleOutput) -> bytes:
    sequences = [
        # One by one: a fragment is copied, and other threads get their turn between two of them.
        orjson.Fragment(
            orjson.dumps(
                {
                    "stop_reason": sequence.stop_reason,
                    "tokens": sequence.tokens.tolist(),
                    "logprobs": sequence.logprobs.tolist(),
                }
            )
        )
        for sequence in result.sequences
    ]
    return _event("done", {"request_id": request_id, "sequences": sequences})


def _failure(message: str, code: str | None, *, retryable: bool) -> bytes:
    return _event("error", {"error": message, "code": code, "retryable": retryable})


def _event(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
