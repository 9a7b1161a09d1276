"""``/v1/completions``: plain continuations of texts or token ids over any adapter."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from api.openai.choices import completion_logprobs, whole_text
from api.openai.errors import OpenAiRoute
from api.openai.generation import Generation, generation, resolve
from api.openai.schemas import CompletionRequest
from api.openai.streaming import streamed
from api.openai.whole import whole
from api.services import Caller, Services
from api.wire.json_body import json_body
from contracts.errors import InvalidRequest
from contracts.operations import SampledSequence
from ledger.token_feed import TokensMade

router = APIRouter(tags=["openai"], route_class=OpenAiRoute)


@router.post("/completions", response_class=Response)
async def completions(
    caller: Caller,
    services: Services,
    request: Request,
    body: Annotated[CompletionRequest, json_body(CompletionRequest)],
) -> Response:
    """``n`` continuations of each prompt, one prompt's after another. Raises ``NotFound`` for the model, ``InvalidRequest``."""
    model, _ = await resolve(services, caller, body.model)
    if body.stream and body.logprobs:
        raise InvalidRequest("logprobs above 0 do not come with stream; leave one of them out")
    opened = generation(
        services,
        caller,
        request,
        body,
        prompts=_prompts(body.prompt),
        max_tokens=body.max_tokens,
        topk=body.logprobs or 0,
        model=model,
    )
    if body.stream:
        return await streamed(opened, head=_head, opening=None, part=_part, end=_end)
    return await whole(opened, head=_head, choice=_choice)


def _choice(made: Generation, sequence: SampledSequence) -> dict[str, Any]:
    tokens, logprobs = sequence.tokens.tolist(), sequence.logprobs.tolist()
    return {
        "text": whole_text(made, tokens),
        "logprobs": completion_logprobs(made, tokens, logprobs, whole=sequence) if _wants_logprobs(made) else None,
    }


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Sequence[int] | str]:
    if isinstance(prompt, str):
        return [prompt]
    found: list[Sequence[int] | str] = []
    ids: list[int] = []
    for one in prompt:
        if isinstance(one, int):
            ids.append(one)
        else:
            found.append(one)
    return [ids] if ids else found


def _wants_logprobs(made: Generation) -> bool:
    return isinstance(made.asked, CompletionRequest) and made.asked.logprobs is not None


def _head(made: Generation) -> dict[str, Any]:
    return {
        "id": f"cmpl-{made.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": made.model.name,
    }


def _part(made: Generation, place: int, text: str, tokens: TokensMade) -> dict[str, Any]:
    logprobs = completion_logprobs(made, tokens.tokens, tokens.logprobs) if _wants_logprobs(made) else None
    return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": None}


def _end(place: int, text: str, stop_reason: str) -> dict[str, Any]:
    return {"index": place, "text": text, "logprobs": None, "finish_reason": stop_reason}
