"""The answer to a request without ``stream``: every choice, whole."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi.responses import JSONResponse

from api.openai.choices import usage
from api.openai.generation import Generation
from contracts.operations import SampledSequence

RenderChoice = Callable[[Generation, SampledSequence], dict[str, Any]]
"""A finished choice without its place and its reason."""


async def whole(
    opened: AbstractAsyncContextManager[Generation],
    *,
    head: Callable[[Generation], dict[str, Any]],
    choice: RenderChoice,
) -> JSONResponse:
    """Once every sequence has ended. Raises what refuses the request, and what failed."""
    async with opened as made:
        sequences = await made.sequences()
        choices = [
            {"index": place, **choice(made, sequence), "finish_reason": sequence.stop_reason}
            for place, sequence in enumerate(sequences)
        ]
        tokens = sum(len(sequence.tokens) for sequence in sequences)
        content = {**head(made), "choices": choices, "usage": usage(made, tokens)}
        return JSONResponse(content, headers={"x-request-id": made.id})
