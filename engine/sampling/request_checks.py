"""Checks of a generate request that every replica makes, so that a mistake gives the same message on each of them."""

import numpy as np
from numpy.typing import NDArray

from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.temperatures import TEMPERATURES, is_drawn_with
from engine.sampling.replica import GenerateRequest, PromptScoring


def check_request(request: GenerateRequest, facts: BaseModelFacts) -> None:
    """Raise ``InvalidRequest`` naming the field of ``request`` that a base model of these ``facts`` cannot serve."""
    check_prompt(request.prompt, request.max_tokens, facts)
    check_choice(request.temperature, request.top_p)
    if not request.seeds:
        raise InvalidRequest("seeds: at least one sequence must be asked for")
    if request.topk < 0:
        raise InvalidRequest("topk must be at least 0")
    if request.scoring is not None and (request.scoring.start < 1 or request.scoring.topk < 0):
        raise InvalidRequest("scoring: start must be at least 1 and topk at least 0")
    if request.scoring is not None:
        _check_cells(request.scoring, len(request.prompt), facts)


def _check_cells(scoring: PromptScoring, length: int, facts: BaseModelFacts) -> None:
    if scoring.alternatives < 0 or (scoring.alternatives and length < 2):
        raise InvalidRequest("scoring: alternatives must be at least 0, and need a prompt of two tokens")
    if scoring.targets is not None:
        positions, tokens = scoring.targets
        if len(positions) and not (1 <= positions[0] <= positions[-1] < length):
            raise InvalidRequest(f"scoring: target positions must be 1 to {length - 1}")
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < facts.vocabulary_size):
            raise InvalidRequest(f"scoring: target tokens must be from 0 to {facts.vocabulary_size - 1}")


def check_prompt(prompt: NDArray[np.int64], max_tokens: int, facts: BaseModelFacts) -> None:
    """Raise ``InvalidRequest`` for a prompt that is empty, has unknown token ids or leaves too little of the context."""
    if len(prompt) == 0:
        raise InvalidRequest("prompt must have at least one token")
    if prompt.min() < 0 or prompt.max() >= facts.vocabulary_size:
        raise InvalidRequest(f"prompt: token ids must be from 0 to {facts.vocabulary_size - 1}")
    if max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1")
    if max_tokens > facts.most_new_tokens(len(prompt)):
        raise InvalidRequest(
            f"prompt ({len(prompt)} tokens) and max_tokens ({max_tokens}) exceed the context of "
            f"{facts.context_length} tokens"
        )


def check_choice(temperature: float, top_p: float) -> None:
    """Raise ``InvalidRequest`` for a ``temperature`` or ``top_p`` out of range."""
    if not is_drawn_with(temperature):
        raise InvalidRequest(f"temperature must be {TEMPERATURES}")
    if not 0 < top_p <= 1:
        raise InvalidRequest("top_p must be over 0 and at most 1")
