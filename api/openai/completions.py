"""``/v1/completions``: plain continuations of texts or token ids over any adapter."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from api.json_body import json_body
from api.openai.choices import completion_logprobs, usage, whole_text
from api.openai.errors import OpenAiRoute
from api.openai.generation import Generation, generation, resolve
from api.openai.schemas import CompletionRequest
from api.openai.streaming import streamed
from api.services import Caller, Services
from engine.contracts.errors import InvalidRequest
from workers.ledger.token_feed import TokensMade

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
    async with opened as made:
        return await _answer(made, body)


async def _answer(made: Generation, body: CompletionRequest) -> Response:
    choices = []
    sequences = await made.sequences()
    for place, sequence in enumerate(sequences):
        tokens, logprobs = sequence.tokens.tolist(), sequence.logprobs.tolist()
        wanted = body.logprobs is not None
        choices.append(
            {
                "index": place,
                "text": whole_text(made, tokens),
                "logprobs": completion_logprobs(made, tokens, logprobs, whole=sequence) if wanted else None,
                "finish_reason": sequence.stop_reason,
            }
        )
    content = {
        **_head(made),
        "choices": choices,
        "usage": usage(made, sum(len(sequence.tokens) for sequence in sequences)),
    }
    return JSONResponse(content, headers={"x-request-id": made.id})


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


def _head(made: Generation) -> dict[str, Any]:
    return {
        "id": f"cmpl-{made.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": made.model.name,
    }


def _part(made: Generation, place: int, text: str, tokens: TokensMade) -> dict[str, Any]:
    asked = made.asked
    wanted = isinstance(asked, CompletionRequest) and asked.logprobs is not None
    logprobs = completion_logprobs(made, tokens.tokens, tokens.logprobs) if wanted else None
    return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": None}


def _end(place: int, text: str, stop_reason: str) -> dict[str, Any]:
    return {"index": place, "text": text, "logprobs": None, "finish_reason": stop_reason}
