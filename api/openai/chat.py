"""``/v1/chat/completions``: the base model's chat template over any adapter."""

import time
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from api.authentication import SampleCaller
from api.json_body import json_body
from api.openai.choices import chat_logprobs, finish_reason, whole_text
from api.openai.errors import OpenAiRoute
from api.openai.full_response import full_response
from api.openai.generation import Generation, check_text_length, generation
from api.openai.messages import Message
from api.openai.models import named_model
from api.openai.streamed_response import streamed_response
from api.openai.text_form import format_grammar
from api.openai.tool_calls import CallDelta, Said
from api.openai.tools import ToolPart, ToolUse, tool_use
from api.request_body import off_loop
from api.route_bounds import TEXT_BODY, Holding, bounded
from api.services import Services
from api.wire.json_counts import DATA
from api.wire.openai_requests import GenerationRequest
from api.wire.request_model import ListOf, PlainJson
from api.wire.sample_checks import FieldNames
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.logit_rules import Grammar
from contracts.operations import SampledSequence, SampleOutput
from contracts.vocabulary import BaseVocabulary
from ledger.token_feed import TokensMade

router = APIRouter(tags=["openai"], route_class=OpenAiRoute)


_BYTES_OF_TURN = 64
"""Bytes of text that take as long to tokenize as the template takes for one turn of a conversation."""
_MOST_CALLS = 128
"""Most tool calls of one answer."""


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: ListOf[ToolPart] = []
    tool_choice: PlainJson[str | dict[str, Any]] | None = None
    parallel_tool_calls: bool = True
    response_format: PlainJson[dict[str, Any]] = {}

    @property
    def token_limit(self) -> int | None:
        """``max_completion_tokens``, or else the older ``max_tokens``."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int:
        """Likeliest tokens that are reported for each place: ``top_logprobs``."""
        return self.top_logprobs

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's logprob is reported."""
        return self.logprobs

    @cached_property
    def tool_use(self) -> ToolUse:
        """Meaning of ``tools`` and ``tool_choice``. Raises ``InvalidRequest``."""
        return tool_use(self.tools, self.tool_choice, several=self.parallel_tool_calls)

    @cached_property
    def grammar(self) -> Grammar | None:
        """Form that the text must have. Raises ``InvalidRequest``."""
        found = format_grammar(self.response_format)
        if found is not None and self.tool_use.functions:
            raise InvalidRequest(
                "response_format does not come with tools; leave one of them out, or send tool_choice none"
            )
        return found or self.tool_use.grammar

    @property
    def grammar_field(self) -> str:
        """Name of the field that asks for ``grammar``."""
        if self.tool_use.must_call:
            return "tool_choice other than none and auto"
        return "tools with strict: true" if self.tool_use.functions else "response_format"

    @property
    def most_calls(self) -> int:
        """Most tool calls that are read from a choice's text; 0 leaves the text as it is."""
        if not self.tool_use.functions:
            return 0
        return _MOST_CALLS if self.tool_use.several else 1

    @property
    def field_names(self) -> FieldNames:
        """Names of this endpoint for the fields of a ``SampleRequest``, where they differ."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {
            **super().field_names,
            "prompt": "messages",
            "max_tokens": limit,
            "topk_sample_logprobs": "top_logprobs",
        }

    def check_offered(self) -> None:
        """Raise ``InvalidRequest`` for a parameter that weft does not offer and that would change the answer."""
        super().check_offered()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true")


@router.post("/chat/completions", response_class=Response)
@bounded(body=TEXT_BODY, holding=Holding.STREAM, goes_on=True)
async def chat_completions(
    caller: SampleCaller,
    services: Services,
    request: Request,
    body: Annotated[ChatRequest, json_body(ChatRequest, DATA)],
) -> Response:
    """Generate the assistant's next turn.

    Raises ``NotFound`` for the model, ``InvalidRequest``, ``OverRate``, and ``TenantHeld`` of a tenant whose work is held.
    """
    model = await named_model(services, caller, body.model)
    if body.stream and body.top_logprobs:
        raise InvalidRequest("top_logprobs do not come with stream; leave one of them out")
    vocabulary, facts = services.vocabularies[model.base_model], services.sampled_base(model.base_model)
    size = len(body.sent) + _BYTES_OF_TURN * (len(body.messages) + len(body.tools))
    prompt = await off_loop(services, caller.tenant, size, _prompt, vocabulary, facts, body)
    opened = generation(services, caller, request, body, prompts=[prompt], model=model)
    if body.stream:
        return await streamed_response(opened, head=_chunk_head, opening=_opening, part=_part, end=_end)
    return await full_response(request, opened, head=_head, choice=_choice)


def _choice(made: Generation, place: int, sequence: SampledSequence, _output: SampleOutput) -> dict[str, Any]:
    tokens, logprobs = sequence.tokens.tolist(), sequence.logprobs.tolist()
    said = whole_text(made, tokens)
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None if said.calls else said.text}
    if said.calls:
        message["tool_calls"] = [_call(made, place, part) for part in said.calls]
    return {
        "message": {**message, "refusal": None},
        "logprobs": chat_logprobs(made, tokens, logprobs, sequence.topk_logprobs)
        if made.asked.wants_logprobs
        else None,
        "finish_reason": finish_reason(sequence.stop_reason, len(said.calls)),
    }


def _prompt(vocabulary: BaseVocabulary, facts: BaseModelFacts, body: ChatRequest) -> list[int]:
    tools = body.tool_use.described
    length = sum(message.length for message in body.messages) + sum(map(len, map(str, tools)))
    check_text_length(length, "messages", vocabulary, facts)
    if vocabulary.chat is None:
        raise InvalidRequest("model: its base model has no chat template; use /v1/completions")
    if tools and not vocabulary.takes_tools:
        raise InvalidRequest(
            f"tools: the chat template of {facts.name} tells the model of none, or has them called in another form than JSON "
            "within <tool_call>; leave them out"
        )
    return vocabulary.chat([message.turn() for message in body.messages], tools)


def _call(made: Generation, place: int, part: CallDelta) -> dict[str, Any]:
    if part.name is None:
        return {"function": {"arguments": part.arguments}}
    return {
        # The same in a repeat of the request.
        "id": f"call_{blake2b(f'{made.id}/{place}/{part.index}'.encode(), digest_size=12).hexdigest()}",
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }


def _delta(made: Generation, place: int, said: Said) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": said.text} if said.text or not said.calls else {}
    if said.calls:
        delta["tool_calls"] = [{"index": part.index, **_call(made, place, part)} for part in said.calls]
    return delta


def _head(made: Generation, kind: str = "chat.completion") -> dict[str, Any]:
    return {"id": f"chatcmpl-{made.id}", "object": kind, "created": int(time.time()), "model": made.model.name}


def _chunk_head(made: Generation) -> dict[str, Any]:
    return _head(made, "chat.completion.chunk")


def _opening(place: int) -> dict[str, Any]:
    return {"index": place, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _part(made: Generation, place: int, said: Said, tokens: TokensMade) -> dict[str, Any]:
    logprobs = chat_logprobs(made, tokens.tokens, tokens.logprobs) if made.asked.wants_logprobs else None
    return {"index": place, "delta": _delta(made, place, said), "logprobs": logprobs, "finish_reason": None}


def _end(made: Generation, place: int, said: Said, reason: str) -> dict[str, Any]:
    delta = _delta(made, place, said) if said.text or said.calls else {}
    return {"index": place, "delta": delta, "logprobs": None, "finish_reason": reason}
