"""The playground: samples from any version that the caller may sample, with each token's weights, streamed or whole."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from api.dashboard.events import PageEvent, StreamEvent, event_stream, with_bell
from api.dashboard.form_values import body_of, integer, number, text
from api.dashboard.forms import Form
from api.dashboard.rendering import large_page
from api.dashboard.tenant.playground_models import label_of, model_choices
from api.dashboard.tenant.playground_stream import answer_of, stream_events
from api.dashboard.tenant.token_pieces import places_of
from api.dashboard.web_session import COUNTED, PageReader, PageSampleCaller, count_data
from api.errors import error_response
from api.openai.generation import check_text_length, generation
from api.openai.models import NamedModel, named_model
from api.request_body import off_loop
from api.route_bounds import TEXT_BODY, Holding, bounded
from api.security_events import note_refusal
from api.services import ApiServices, Services
from api.wire.openai_requests import GenerationRequest
from contracts.errors import InvalidRequest, WeftError
from contracts.vocabulary import ChatMessage
from tenants.rights import Principal

router = APIRouter(prefix="/playground")

MOST_TOKENS = 4096
MOST_ALTERNATIVES = 10
_DEFAULTS = {"mode": "text", "max_tokens": "64", "temperature": "1", "top_p": "1", "top_logprobs": "5"}
_FIELDS = ("model", "beside", "mode", "system", "prompt", "max_tokens", "temperature", "top_p", "top_logprobs", "seed")


class PlaygroundRequest(GenerationRequest):
    """Sample that the playground's form asks for. ``mode`` ``chat`` puts the prompt into the base's chat template."""

    prompt: str
    mode: str = "text"
    system: str = ""
    top_logprobs: int = 0

    @property
    def alternatives(self) -> int:
        """Likeliest tokens that are reported for each place."""
        return self.top_logprobs


@router.get("")
async def playground_page(caller: PageReader, services: Services, request: Request) -> Response:
    """Show the form, with ``model`` and ``beside`` chosen if the address names them."""
    given = {name: value[:500] for name, value in request.query_params.items() if name in _FIELDS}
    return await _page(caller, services, request, {**dict.fromkeys(_FIELDS, ""), **_DEFAULTS, **given}, [])


@router.post("", dependencies=[COUNTED])
@bounded(body=TEXT_BODY, holding=Holding.STREAM, goes_on=True)
async def sample_whole(caller: PageSampleCaller, services: Services, request: Request, form: Form) -> Response:
    """Sample, and show the page with the whole answers: for browsers without scripts."""
    models = [name for name in (text(form, "model"), text(form, "beside")) if name is not None]
    answers = await asyncio.gather(*(_whole(caller, services, request, form, name) for name in models))
    places = places_of(answer["tokens"] for answer in answers)
    given = {name: text(form, name) or "" for name in _FIELDS}
    shown = [{**one, "places": places, "facts": {used.version: used for used in one["versions"]}} for one in answers]
    return await _page(caller, services, request, given, shown)


@router.post("/stream")
@bounded(body=TEXT_BODY, holding=Holding.STREAM, goes_on=True)
async def sample_stream(caller: PageSampleCaller, services: Services, request: Request, form: Form) -> Response:
    """Sample from one model and stream the tokens as server-sent events.

    A repeat with the same ``Idempotency-Key`` follows the first sample from its first token on. Leaving ends the sample.
    """
    try:
        # Here, since the page's script reads why it is refused from JSON.
        await count_data(request, services, caller)
        events = stream_events(await _opened(caller, services, request, form, text(form, "model")))
        first = await anext(events)
    except WeftError as error:
        note_refusal(request, error)
        return error_response(
            error.status,
            detail=error.message,
            code=error.code,
            retryable=error.retryable,
            retry_after=error.retry_after,
        )
    return event_stream(request, services, partial(with_bell, _after(first, events)))


async def _after(first: PageEvent, rest: AsyncGenerator[PageEvent, None]) -> AsyncGenerator[StreamEvent, None]:
    try:
        yield first
        async for event in rest:
            yield event
    finally:
        # Leaving ends the sample.
        await rest.aclose()


async def _page(
    caller: Principal, services: ApiServices, request: Request, given: dict[str, str], answers: list[Any]
) -> Response:
    groups = await model_choices(caller, services)
    offered = [one for choices in groups.values() for one in choices]
    asked = (given["model"], given["beside"], *(answer["model"] for answer in answers))
    labels = {name: label_of(name, offered) for name in asked}
    chats = sorted(name for name, one in services.vocabularies.items() if one.chat is not None)
    values: dict[str, Any] = {"groups": groups, "labels": labels, "given": given, "answers": answers, "chats": chats}
    return await large_page(request, caller, "tenant/playground.html", **values)


async def _whole(
    caller: Principal, services: ApiServices, request: Request, form: Mapping[str, str], name: str
) -> dict[str, Any]:
    """Return the whole answer of one model, or the error that it ended with."""
    try:
        async with await _opened(caller, services, request, form, name) as made:
            return {**await answer_of(made), "error": ""}
    except WeftError as error:
        note_refusal(request, error)
        return {"model": name, "error": error.message, "tokens": [], "versions": []}


async def _opened(
    caller: Principal, services: ApiServices, request: Request, form: Mapping[str, str], name: str | None
) -> Any:
    """Return the context in which the sample is accepted and followed. Raises ``InvalidRequest``, ``NotFound``."""
    asked = body_of(
        PlaygroundRequest,
        model=name,
        mode=text(form, "mode"),
        system=text(form, "system"),
        prompt=text(form, "prompt") or "",
        max_tokens=integer(form, "max_tokens"),
        temperature=number(form, "temperature"),
        top_p=number(form, "top_p"),
        top_logprobs=integer(form, "top_logprobs"),
        seed=integer(form, "seed"),
    )
    _check(asked)
    model = await named_model(services, caller, asked.model)
    size = len(asked.prompt) + len(asked.system)
    prompt = await off_loop(services, caller.tenant, size, _prompt, services, model, asked)
    return generation(services, caller, request, asked, prompts=[prompt], model=model)


def _check(asked: PlaygroundRequest) -> None:
    if asked.max_tokens is None or not 1 <= asked.max_tokens <= MOST_TOKENS:
        raise InvalidRequest(f"max_tokens must be 1 to {MOST_TOKENS} in the playground")
    if not 0 <= asked.top_logprobs <= MOST_ALTERNATIVES:
        raise InvalidRequest(f"top_logprobs must be 0 to {MOST_ALTERNATIVES} in the playground")
    if not asked.prompt:
        raise InvalidRequest("prompt is empty; write what the sample goes on from")


def _prompt(services: ApiServices, model: NamedModel, asked: PlaygroundRequest) -> list[int] | str:
    """Return the prompt as text, or as the tokens of a conversation. Raises ``InvalidRequest``."""
    if asked.mode != "chat":
        return asked.prompt
    vocabulary = services.vocabularies[model.base_model]
    if vocabulary.chat is None:
        raise InvalidRequest(f"mode: {model.base_model} has no chat template; choose text")
    check_text_length(
        len(asked.prompt) + len(asked.system), "prompt", vocabulary, services.sampled_base(model.base_model)
    )
    turns = [ChatMessage("system", asked.system)] if asked.system else []
    return vocabulary.chat([*turns, ChatMessage("user", asked.prompt)], [])
