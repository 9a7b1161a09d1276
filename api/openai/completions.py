"""``/v1/completions``: plain continuations of texts or token ids over any adapter."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, StrictInt

from api.authentication import Sampler
from api.json_body import json_body
from api.openai.choices import completion_logprobs, whole_text
from api.openai.errors import OpenAiRoute
from api.openai.full_response import full_response
from api.openai.generation import Generation, generation
from api.openai.models import named_model
from api.openai.streamed_response import streamed_response
from api.openai.tool_calls import Said
from api.route_bounds import PROMPT_BODY, Holding, bounded
from api.services import Services
from api.wire.json_counts import DATA
from api.wire.openai_requests import MOST_TOP_LOGPROBS, GenerationRequest
from api.wire.request_model import ListOf
from api.wire.sample_checks import FieldNames
from contracts.errors import InvalidRequest
from contracts.operations import SampledSequence
from ledger.token_feed import TokensMade

router = APIRouter(tags=["openai"], route_class=OpenAiRoute)


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``. ``prompt`` is one or several texts, or one or several lists of token ids."""

    prompt: str | ListOf[str] | ListOf[StrictInt] | ListOf[ListOf[StrictInt]]
    max_tokens: int | None = 16
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
    echo: bool = False
    best_of: int | None = None

    @property
    def alternatives(self) -> int:
        """Likeliest tokens that are reported for each place: ``logprobs``, here a number."""
        return self.logprobs or 0

    @property
    def wants_logprobs(self) -> bool:
        """True if each token's logprob is reported: also for ``logprobs`` 0."""
        return self.logprobs is not None

    @property
    def field_names(self) -> FieldNames:
        """Names of this endpoint for the fields of a ``SampleRequest``, where they differ."""
        return {**super().field_names, "topk_sample_logprobs": "logprobs"}

    def check_offered(self) -> None:
        """Raise ``InvalidRequest`` for a parameter that weft does not offer and that would change the answer."""
        super().check_offered()
        if self.best_of not in (None, self.n):
            raise InvalidRequest("best_of other than n is not offered by this weft; leave it out")
        if self.echo and (self.stream or self.logprobs is not None):
            raise InvalidRequest("echo does not come with stream or logprobs; leave one of them out")


@router.post("/completions", response_class=Response)
@bounded(body=PROMPT_BODY, holding=Holding.STREAM)
async def completions(
    caller: Sampler,
    services: Services,
    request: Request,
    body: Annotated[CompletionRequest, json_body(CompletionRequest, DATA)],
) -> Response:
    """Generate ``n`` continuations of each prompt; choices come prompt by prompt.

    Raises ``NotFound`` for the model, ``InvalidRequest``.
    """
    model = await named_model(services, caller, body.model)
    if body.stream and body.logprobs:
        raise InvalidRequest("logprobs above 0 do not come with stream; leave one of them out")
    opened = generation(services, caller, request, body, prompts=_prompts(body.prompt), model=model)
    if body.stream:
        return await streamed_response(opened, head=_head, opening=None, part=_part, end=_end)
    return await full_response(request, opened, head=_head, choice=_choice)


def _choice(made: Generation, place: int, sequence: SampledSequence) -> dict[str, Any]:
    tokens, logprobs = sequence.tokens.tolist(), sequence.logprobs.tolist()
    return {
        "text": _echoed(made, place) + whole_text(made, tokens).text,
        "logprobs": completion_logprobs(made, tokens, logprobs, whole=sequence) if made.asked.wants_logprobs else None,
        "finish_reason": sequence.stop_reason,
    }


def _echoed(made: Generation, place: int) -> str:
    """Return the text of the prompt of the choice at ``place`` if the request asks for it, else nothing."""
    if not (isinstance(made.asked, CompletionRequest) and made.asked.echo):
        return ""
    return made.decode(made.prompts[place // made.asked.n])


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


def _part(made: Generation, place: int, said: Said, tokens: TokensMade) -> dict[str, Any]:
    logprobs = completion_logprobs(made, tokens.tokens, tokens.logprobs) if made.asked.wants_logprobs else None
    return {"index": place, "text": said.text, "logprobs": logprobs, "finish_reason": None}


def _end(_made: Generation, place: int, said: Said, reason: str) -> dict[str, Any]:
    return {"index": place, "text": said.text, "logprobs": None, "finish_reason": reason}
