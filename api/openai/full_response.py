"""The answer to an OpenAI request without ``stream``: one JSON object with every finished choice."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import orjson
from fastapi import Request, Response

from api.disconnects import unless_client_leaves
from api.openai.choices import usage
from api.openai.generation import Generation
from contracts.operations import SampledSequence, SampleOutput

RenderChoice = Callable[[Generation, int, SampledSequence, SampleOutput], dict[str, Any]]
"""Renders a finished choice, given its place among all and the result that it is of, without its ``index``."""


_CLIENT_CLOSED = 499
"""Status of an answer that nobody reads, as proxies log it."""


async def full_response(
    request: Request,
    opened: AbstractAsyncContextManager[Generation],
    *,
    head: Callable[[Generation], dict[str, Any]],
    choice: RenderChoice,
) -> Response:
    """Wait until every sequence has ended, and answer with all of them. A client that leaves ends its samples.

    Raises the error that refuses the request or that ended a sample.
    """
    answer = await unless_client_leaves(request, _full(opened, head, choice))
    return Response(status_code=_CLIENT_CLOSED) if answer is None else answer


async def _full(
    opened: AbstractAsyncContextManager[Generation], head: Callable[[Generation], dict[str, Any]], choice: RenderChoice
) -> Response:
    async with opened as made:
        finished = [(sequence, output) for output in await made.outputs() for sequence in output.sequences]
        tokens = 0 if made.asked.only_echoes else sum(len(sequence.tokens) for sequence, _ in finished)

        def rendered() -> bytes:
            choices = [
                # One by one: a fragment is copied, and other threads get their turn between two of them.
                orjson.Fragment(orjson.dumps({"index": place, **choice(made, place, sequence, output)}))
                for place, (sequence, output) in enumerate(finished)
            ]
            return orjson.dumps({**head(made), "choices": choices, "usage": usage(made, tokens)})

        # An echoed prompt is turned into text for each choice.
        body = await made.off_loop(tokens + made.prompt_tokens * made.asked.n, rendered)
        return Response(body, media_type="application/json", headers={"x-request-id": made.id})
