"""``/v1/chat/completions``: the base's chat template over any adapter."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from api.openai.choices import chat_logprobs, whole_text
from api.openai.errors import OpenAiRoute
from api.openai.generation import Generation, generation, resolve
from api.openai.schemas import ChatRequest, Message
from api.openai.streaming import streamed
from api.openai.whole import whole
from api.services import Caller, Services
from api.wire.json_body import json_body
from contracts.errors import InvalidRequest
from contracts.operations import SampledSequence
from contracts.vocabulary import BaseVocabulary, ChatMessage
from ledger.token_feed import TokensMade

router = APIRouter(tags=["openai"], route_class=OpenAiRoute)


@router.post("/chat/completions", response_class=Response)
async def chat_completions(
    caller: Caller, services: Services, request: Request, body: Annotated[ChatRequest, json_body(ChatRequest)]
) -> Response:
    """The assistant's next turn. Raises ``NotFound`` for the model, ``InvalidRequest``."""
    model, vocabulary = await resolve(services, caller, body.model)
    if body.stream and body.top_logprobs:
        raise InvalidRequest("top_logprobs do not come with stream; leave one of them out")
    opened = generation(
        services,
        caller,
        request,
        body,
        prompts=[_prompt(vocabulary, body.messages)],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        topk=body.top_logprobs,
        model=model,
    )
    if body.stream:
        return await streamed(opened, head=_chunk_head, opening=_opening, part=_part, end=_end)
    return await whole(opened, head=_head, choice=_choice)


def _choice(made: Generation, sequence: SampledSequence) -> dict[str, Any]:
    tokens, logprobs = sequence.tokens.tolist(), sequence.logprobs.tolist()
    return {
        "message": {"role": "assistant", "content": whole_text(made, tokens), "refusal": None},
        "logprobs": chat_logprobs(made, tokens, logprobs, sequence) if _wants_logprobs(made) else None,
    }


def _prompt(vocabulary: BaseVocabulary, messages: Sequence[Message]) -> list[int]:
    if vocabulary.chat is None:
        raise InvalidRequest("this base model has no chat template; use /v1/completions")
    return vocabulary.chat([ChatMessage(message.role, _text(message)) for message in messages])


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if any(part.type != "text" or part.text is None for part in message.content):
        raise InvalidRequest("messages: only parts of type text are offered by this weft")
    return "".join(part.text or "" for part in message.content)


def _wants_logprobs(made: Generation) -> bool:
    return isinstance(made.asked, ChatRequest) and made.asked.logprobs


def _head(made: Generation, kind: str = "chat.completion") -> dict[str, Any]:
    return {"id": f"chatcmpl-{made.id}", "object": kind, "created": int(time.time()), "model": made.model.name}


def _chunk_head(made: Generation) -> dict[str, Any]:
    return _head(made, "chat.completion.chunk")


def _opening(place: int) -> dict[str, Any]:
    return {"index": place, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _part(made: Generation, place: int, text: str, tokens: TokensMade) -> dict[str, Any]:
    logprobs = chat_logprobs(made, tokens.tokens, tokens.logprobs) if _wants_logprobs(made) else None
    return {"index": place, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}


def _end(place: int, text: str, stop_reason: str) -> dict[str, Any]:
    return {
        "index": place,
        "delta": {"content": text} if text else {},
        "logprobs": None,
        "finish_reason": stop_reason,
    }
