"""``/v1/completions``: plain continuations of texts or token ids over any adapter."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import StrictInt

from api.authentication import SampleCaller
from api.json_body import json_body
from api.openai.choices import completion_logprobs, prompt_logprobs, whole_text
from api.openai.errors import OpenAiRoute
from api.openai.full_response import full_response
from api.openai.generation import Generation, generation
from api.openai.models import named_model
from api.openai.streamed_response import streamed_response
from api.openai.tool_calls import Said
from api.route_bounds import PROMPT_BODY, Holding, bounded
from api.services import Services
from api.wire.json_counts import DATA
from api.wire.openai_requests import GenerationRequest
from api.wire.request_model import ListOf
from api.wire.sample_checks import FieldNames
from contracts.errors import InvalidRequest
from contracts.operations import SampledSequence, SampleOutput
from ledger.token_feed import TokensMade

router = APIRouter(tags=["openai"], route_class=OpenAiRoute)


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``. ``prompt`` is one or several texts, or one or several lists of token ids."""

    prompt: str | ListOf[str] | ListOf[StrictInt] | ListOf[ListOf[StrictInt]]
    max_tokens: int | None = 16
    logprobs: int | None = None
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
    def scores_prompt(self) -> bool:
        """True if the logprobs of the prompt's tokens are reported, too."""
        return self.echo and self.wants_logprobs

    @property
    def token_limit(self) -> int | None:
        """Most tokens of a choice. A prompt that is only echoed is sampled for one token, which is left out."""
        return 1 if self.only_echoes else self.max_tokens

    @property
    def only_echoes(self) -> bool:
        """True if the prompt is asked for and nothing after it, as evaluations score texts."""
        return self.echo and self.max_tokens == 0

    @property
    def field_names(self) -> FieldNames:
        """Names of this endpoint for the fields of a ``SampleRequest``, where they differ."""
        return {**super().field_names, "topk_sample_logprobs": "logprobs"}

    def check_offered(self) -> None:
        """Raise ``InvalidRequest`` for a parameter that weft does not offer and that would change the answer."""
        super().check_offered()
        if self.best_of not in (None, self.n):
            raise InvalidRequest("best_of other than n is not offered by this weft; leave it out")
        if self.echo and self.stream:
            raise InvalidRequest("echo does not come with stream; leave one of them out")


@router.post("/completions", response_class=Response)
@bounded(body=PROMPT_BODY, holding=Holding.STREAM, goes_on=True)
async def completions(
    caller: SampleCaller,
    services: Services,
    request: Request,
    body: Annotated[CompletionRequest, json_body(CompletionRequest, DATA)],
) -> Response:
    """Generate ``n`` continuations of each prompt; choices come prompt by prompt.

    Raises ``NotFound`` for the model, ``InvalidRequest``, ``OverRate``, and ``TenantHeld`` of a tenant whose work is held.
    """
    model = await named_model(services, caller, body.model)
    if body.stream and body.logprobs:
        raise InvalidRequest("logprobs above 0 do not come with stream; leave one of them out")
    opened = generation(services, caller, request, body, prompts=_prompts(body.prompt), model=model)
    if body.stream:
        return await streamed_response(opened, head=_head, opening=None, part=_StreamedParts().part, end=_end)
    return await full_response(request, opened, head=_head, choice=_choice)


def _choice(made: Generation, place: int, sequence: SampledSequence, output: SampleOutput) -> dict[str, Any]:
    tokens, logprobs = sequence.tokens.tolist(), sequence.logprobs.tolist()
    echo = isinstance(made.asked, CompletionRequest) and made.asked.echo
    if made.asked.only_echoes:
        tokens, logprobs = [], []
    number = place // made.asked.n
    prompt = made.prompts[number] if echo else []
    before = _before(made, number) if echo else ""
    told = None
    if made.asked.wants_logprobs:
        told = completion_logprobs(made, tokens, logprobs, offset=len(before), topk=sequence.topk_logprobs)
        if echo:
            told = _joined(prompt_logprobs(made, prompt, output, before), told)
    return {
        "text": before + whole_text(made, tokens).text,
        "logprobs": told,
        # The token that is left out may have ended the text; no token at all has been asked for.
        "finish_reason": "length" if made.asked.only_echoes else sequence.stop_reason,
    }


def _before(made: Generation, number: int) -> str:
    """Return a prompt's text: as it was sent, without what the tokenizer puts first, or that of the tokens that were sent."""
    sent = _prompts(made.asked.prompt)[number] if isinstance(made.asked, CompletionRequest) else ""
    return sent if isinstance(sent, str) else made.decode(made.prompts[number])


def _joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the logprobs of a prompt and of what follows it as those of one text."""
    return {name: None if part is None else part + after[name] for name, part in before.items()}


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


class _StreamedParts:
    """Renders the chunks of one stream; each sequence's ``text_offset`` goes on from its chunk before."""

    def __init__(self) -> None:
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """Characters of the texts of the tokens that were told, by the sequence's place."""

    def part(self, made: Generation, place: int, said: Said, tokens: TokensMade) -> dict[str, Any]:
        """Return the choice of a chunk."""
        logprobs = None
        if made.asked.wants_logprobs:
            logprobs = completion_logprobs(made, tokens.tokens, tokens.logprobs, offset=self._offsets[place])
            self._offsets[place] += sum(map(len, logprobs["tokens"]))
        return {"index": place, "text": said.text, "logprobs": logprobs, "finish_reason": None}


def _end(_made: Generation, place: int, said: Said, reason: str) -> dict[str, Any]:
    return {"index": place, "text": said.text, "logprobs": None, "finish_reason": reason}
