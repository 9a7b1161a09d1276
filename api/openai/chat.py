"""``/v1/chat/completions``: the base model's chat template over any adapter."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from api.authentication import Sampler
from api.json_body import json_body
from api.openai.choices import chat_logprobs, whole_text
from api.openai.errors import OpenAiRoute
from api.openai.full_response import full_response
from api.openai.generation import Generation, check_text_length, generation
from api.openai.models import named_model
from api.openai.streamed_response import streamed_response
from api.request_body import off_loop
from api.route_bounds import TEXT_BODY, Holding, bounded
from api.services import Services
from api.wire.json_counts import DATA
from api.wire.openai_requests import MOST_TOP_LOGPROBS, GenerationRequest
from api.wire.request_model import BodyPart, ListOf
from api.wire.sample_checks import FieldNames
from contracts.errors import InvalidRequest
from contracts.operations import SampledSequence
from contracts.vocabulary import BaseVocabulary, ChatMessage
from ledger.token_feed import TokensMade

router = APIRouter(tags=["openai"], route_class=OpenAiRoute)


_BYTES_OF_TURN = 64
"""Bytes of text that take as long to tokenize as the template takes for one turn of a conversation."""


class TextPart(BodyPart):
    """A piece of a message."""

    type: str = "text"
    text: str | None = None


class Message(BodyPart):
    """A turn of a conversation."""

    role: str
    content: str | ListOf[TextPart] | None = None
    tool_calls: ListOf[Any] | None = None


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_TOP_LOGPROBS)
    tools: ListOf[Any] = []
    response_format: dict[str, Any] = {}

    @property
    def token_limit(self) -> int | None:
        """``max_completion_tokens``, or else the older ``max_tokens``."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int:
        """Likeliest tokens that are reported for each place: ``top_logprobs``."""
        return self.top_logprobs

    @property
    def field_names(self) -> FieldNames:
        """Names of this endpoint for the fields of a ``SampleRequest``, where they differ."""
        limit = "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
        return {
            **super().field_names,
            "prompt": "messages",
            "max_tokens": limit,
            "topk_sample_logprobs": "top_logprobs",
        }

    def check_offered(self) -> None:
        """Raise ``InvalidRequest`` for a parameter that weft does not offer and that would change the answer."""
        super().check_offered()
        if self.tools or any(message.tool_calls for message in self.messages):
            raise InvalidRequest("tools are not offered by this weft; leave them out")
        if self.response_format.get("type", "text") != "text":
            raise InvalidRequest("response_format other than text is not offered by this weft; leave it out")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true")


@router.post("/chat/completions", response_class=Response)
@bounded(body=TEXT_BODY, holding=Holding.STREAM)
async def chat_completions(
    caller: Sampler, services: Services, request: Request, body: Annotated[ChatRequest, json_body(ChatRequest, DATA)]
) -> Response:
    """Generate the assistant's next turn. Raises ``NotFound`` for the model, ``InvalidRequest``."""
    model = await named_model(services, caller, body.model)
    if body.stream and body.top_logprobs:
        raise InvalidRequest("top_logprobs do not come with stream; leave one of them out")
    vocabulary, facts = services.vocabularies[model.base_model], services.sampled_base(model.base_model)
    size = sum(_BYTES_OF_TURN + len(_text(message)) for message in body.messages)
    check_text_length(size - _BYTES_OF_TURN * len(body.messages), "messages", vocabulary, facts)
    prompt = await off_loop(services, caller.tenant, size, _prompt, vocabulary, body.messages)
    opened = generation(services, caller, request, body, prompts=[prompt], model=model)
    if body.stream:
        return await streamed_response(opened, head=_chunk_head, opening=_opening, part=_part, end=_end)
    return await full_response(request, opened, head=_head, choice=_choice)


def _choice(made: Generation, _place: int, sequence: SampledSequence) -> dict[str, Any]:
    tokens, logprobs = sequence.tokens.tolist(), sequence.logprobs.tolist()
    return {
        "message": {"role": "assistant", "content": whole_text(made, tokens), "refusal": None},
        "logprobs": chat_logprobs(made, tokens, logprobs, sequence) if _wants_logprobs(made) else None,
    }


def _prompt(vocabulary: BaseVocabulary, messages: Sequence[Message]) -> list[int]:
    if vocabulary.chat is None:
        raise InvalidRequest("model: its base model has no chat template; use /v1/completions")
    return vocabulary.chat([ChatMessage(message.role, _text(message)) for message in messages])


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if any(part.type != "text" or part.text is None for part in message.content):
        raise InvalidRequest("messages: only parts of type text are offered by this weft; leave the others out")
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
