"""The answer to an OpenAI request with ``stream``: server-sent events, ``data: {…}`` chunks and then ``data: [DONE]``."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import orjson
from fastapi.responses import StreamingResponse

from api.openai.choices import ChoiceText, finish_reason, usage
from api.openai.errors import error_body
from api.openai.generation import Generation
from api.openai.tool_calls import Said
from contracts.errors import WeftError
from ledger.token_feed import TokensMade

RenderPart = Callable[[Generation, int, Said, TokensMade], dict[str, Any]]
"""Renders the choice of a chunk from the sequence's place, what it says and the tokens that came."""
RenderEnd = Callable[[Generation, int, Said, str], dict[str, Any]]
"""Renders the last choice of a sequence from its place, the rest of what it says and its finish reason."""


async def streamed_response(
    opened: AbstractAsyncContextManager[Generation],
    *,
    head: Callable[[Generation], dict[str, Any]],
    opening: Callable[[int], dict[str, Any]] | None,
    part: RenderPart,
    end: RenderEnd,
) -> StreamingResponse:
    """Answer with a stream of the choices. ``opening`` renders the first choice of each sequence, if there is one.

    Raises the error that refuses the request. A later error is an event of the stream.
    """
    events = _events(opened, head, opening, part, end)
    # The samples are accepted before the response begins, so that a refusal has a status of its own.
    request_id = await anext(events)
    headers = {"Cache-Control": "no-store", "x-request-id": request_id.decode()}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(
    opened: AbstractAsyncContextManager[Generation],
    head: Callable[[Generation], dict[str, Any]],
    opening: Callable[[int], dict[str, Any]] | None,
    part: RenderPart,
    end: RenderEnd,
) -> AsyncIterator[bytes]:
    async with opened as generation:
        yield generation.id.encode()
        common = head(generation)
        count = len(generation.prompts) * generation.asked.n
        texts = [ChoiceText(generation, tells_arguments=True) for _ in range(count)]
        try:
            if opening is not None:
                for place in range(count):
                    yield _chunk(common, [opening(place)])
            async for said in generation.parts():
                if said is None:
                    yield b": still here\n\n"
                    continue
                place, tokens = said
                chunk = await generation.off_loop(
                    len(tokens.tokens), _piece, generation, common, place, texts[place], tokens, part
                )
                if chunk:
                    yield chunk
            sequences = await generation.sequences()
            for place, sequence in enumerate(sequences):
                rest = texts[place].end()
                reason = finish_reason(sequence.stop_reason, texts[place].calls)
                yield _chunk(common, [end(generation, place, rest, reason)])
            if generation.asked.stream_options.include_usage:
                made = sum(len(sequence.tokens) for sequence in sequences)
                yield _chunk({**common, "usage": usage(generation, made)}, [])
        except WeftError as error:
            yield b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
        yield b"data: [DONE]\n\n"


def _piece(
    generation: Generation,
    common: dict[str, Any],
    place: int,
    stream: ChoiceText,
    tokens: TokensMade,
    part: RenderPart,
) -> bytes:
    """Return the chunk for new tokens of a sequence; empty without any."""
    said = stream.push(tokens.tokens)
    has_news = said.text or said.calls or tokens.tokens
    return _chunk(common, [part(generation, place, said, tokens)]) if has_news else b""


def _chunk(common: dict[str, Any], choices: list[dict[str, Any]]) -> bytes:
    return b"data: " + orjson.dumps({**common, "choices": choices}) + b"\n\n"
