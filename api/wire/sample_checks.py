"""Checks of a ``SampleRequest`` against the base model and the limits, shared by Tinker's and OpenAI's wire."""

from collections.abc import Mapping

import numpy as np

from api.wire.token_ids import check_token_ids
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.operations import SampleRequest, SamplingParams
from contracts.prompt_cells import NO_TOKEN
from contracts.temperatures import TEMPERATURES, is_drawn_with
from store.settings import Settings

MAX_STOPS = 64
"""Most stop strings or stop tokens of one request."""
MAX_STOP_LENGTH = 1000
"""Longest stop string, in characters."""
MAX_TOP_K = 2**31 - 1
"""Largest ``top_k``: int32 on the wire."""

FieldNames = Mapping[str, str]
"""A wire's names for the fields of ``SampleRequest`` and ``SamplingParams``, where they differ. Errors use them.

``stop`` stands for ``stop_strings`` and ``stop_tokens``.
"""


def check_sample(sample: SampleRequest, facts: BaseModelFacts, settings: Settings, names: FieldNames) -> None:
    """Raise ``InvalidRequest`` unless the base model and the limits allow ``sample``; the text has the wire's ``names``."""
    prompt = names.get("prompt", "prompt")
    if len(sample.prompt) == 0:
        raise InvalidRequest(f"{prompt} is empty; send at least one token")
    check_token_ids(sample.prompt, prompt, facts)
    _check_params(sample.params, facts, names)
    max_tokens = sample.params.max_tokens or 1
    if max_tokens > facts.most_new_tokens(len(sample.prompt)):
        raise InvalidRequest(
            f"{prompt} ({len(sample.prompt)} tokens) and {names.get('max_tokens', 'max_tokens')} ({max_tokens}) are "
            f"{len(sample.prompt) + max_tokens} together; the context of {facts.name} holds {facts.context_length}, and one "
            "more drawn token needs no place: shorten one of them"
        )
    _check_range(sample.num_samples, names.get("num_samples", "num_samples"), 1, settings.max_samples)
    for field in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        _check_range(getattr(sample, field), names.get(field, field), 0, settings.max_topk_logprobs)
    _check_last_n(sample, names)
    _check_prompt_cells(sample, facts, settings)


def check_rows(given: int, rows: int, name: str) -> None:
    """Raise ``InvalidRequest`` unless a matrix over a prompt has a row for each token but the first."""
    if given != rows:
        raise InvalidRequest(
            f"{name} has {given} rows; it must have {rows}, one for each token of the prompt but the first"
        )


def _check_last_n(sample: SampleRequest, names: FieldNames) -> None:
    last_n = sample.prompt_logprobs_last_n
    if last_n is None:
        return
    name = names.get("prompt_logprobs_last_n", "prompt_logprobs_last_n")
    if not sample.prompt_logprobs:
        raise InvalidRequest(f"{name} needs prompt_logprobs: true")
    if len(sample.prompt) == 1:
        raise InvalidRequest(f"{name}: the only token of this prompt has no logprob; leave it out")
    _check_range(last_n, name, 1, len(sample.prompt) - 1)


def _check_prompt_cells(sample: SampleRequest, facts: BaseModelFacts, settings: Settings) -> None:
    rows = len(sample.prompt) - 1
    if sample.prompt_alt_tokens_k and rows == 0:
        raise InvalidRequest("prompt_alt_tokens_k: the only token of this prompt has no alternatives; leave it out")
    cells, name = sample.target_prompt_logprobs, "target_prompt_logprobs"
    if cells is None:
        return
    given = len(cells.values) if cells.crow is None else len(cells.crow) - 1
    check_rows(given, rows, name)
    if cells.values.size and not (cells.values.min() >= NO_TOKEN and cells.values.max() < facts.vocabulary_size):
        raise InvalidRequest(f"{name}: token ids must be 0 to {facts.vocabulary_size - 1}, or {NO_TOKEN} for none")
    positions, _ = cells.wanted()
    if len(positions) == 0:
        raise InvalidRequest(f"{name} names no token; send at least one, or leave it out")
    most = int(np.bincount(positions).max())
    if most > settings.max_topk_logprobs:
        raise InvalidRequest(
            f"{name} names {most} tokens at one position; send at most {settings.max_topk_logprobs}, or several requests"
        )


def _check_params(params: SamplingParams, facts: BaseModelFacts, names: FieldNames) -> None:
    def name(field: str) -> str:
        return names.get(field, field)

    if not is_drawn_with(params.temperature):
        raise InvalidRequest(f"{name('temperature')} must be {TEMPERATURES}")
    if not 0 < params.top_p <= 1:
        raise InvalidRequest(f"{name('top_p')} must be above 0 and at most 1; got {params.top_p}")
    if not -1 <= params.top_k <= MAX_TOP_K:
        raise InvalidRequest(f"{name('top_k')} must be 1 to {MAX_TOP_K}, or -1 for off; got {params.top_k}")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequest(f"{name('max_tokens')} must be 1 or more; got {params.max_tokens}")
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise InvalidRequest(f"{name('seed')} must fit 64 bits")
    strings, tokens = params.stop_strings or [], params.stop_tokens or []
    if len(strings) + len(tokens) > MAX_STOPS:
        raise InvalidRequest(f"{name('stop')} has {len(strings) + len(tokens)} entries; send at most {MAX_STOPS}")
    if any(len(one) > MAX_STOP_LENGTH for one in strings):
        raise InvalidRequest(f"{name('stop')} has a string of over {MAX_STOP_LENGTH} characters; send a shorter one")
    if "" in strings:
        raise InvalidRequest(f"{name('stop')} has an empty string; leave it out")
    if any(not 0 <= token < facts.vocabulary_size for token in tokens):
        raise InvalidRequest(f"{name('stop')}: token ids must be 0 to {facts.vocabulary_size - 1}")


def _check_range(value: int, name: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be {low} to {high}; got {value}")
