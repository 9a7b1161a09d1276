"""Sample requests to typed records, checked against the base model and the limits."""

import math

from api.wire.schemas import AsampleRequest, JsonSamplingParams
from api.wire.training_codec import check_token_ids, tokens_of
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.operations import SampleRequest, SamplingParams
from store.settings import Settings

MAX_STOPS = 64
"""Stop strings or tokens of one request."""
MAX_TOP_K = 2**31 - 1
"""int32 on the wire."""


def sample_request(asked: AsampleRequest, facts: BaseModelFacts, settings: Settings) -> SampleRequest:
    """The payload of ``asked``. Raises ``InvalidRequest`` naming the field and the limit."""
    _check_offered(asked)
    prompt = tokens_of(asked.prompt, "prompt", facts)
    if len(prompt) == 0:
        raise InvalidRequest("prompt is empty; send at least one token")
    check_token_ids(prompt, "prompt", facts)
    params = _params(asked.sampling_params or JsonSamplingParams(), facts)
    longest = len(prompt) + (params.max_tokens or 1)
    if longest > facts.context_length:
        raise InvalidRequest(
            f"prompt ({len(prompt)} tokens) and sampling_params.max_tokens ({params.max_tokens or 1}) are {longest} "
            f"together; the context of {facts.name} holds {facts.context_length}"
        )
    num_samples = 1 if asked.num_samples is None else asked.num_samples
    _check_range("num_samples", num_samples, 1, settings.max_samples)
    topk_prompt, topk_sample = asked.topk_prompt_logprobs or 0, asked.topk_sample_logprobs or 0
    _check_range("topk_prompt_logprobs", topk_prompt, 0, settings.max_topk_logprobs)
    _check_range("topk_sample_logprobs", topk_sample, 0, settings.max_topk_logprobs)
    last_n = asked.prompt_logprobs_last_n
    if last_n is not None:
        if not asked.prompt_logprobs:
            raise InvalidRequest("prompt_logprobs_last_n needs prompt_logprobs")
        if len(prompt) == 1:
            raise InvalidRequest("prompt_logprobs_last_n: the only token of this prompt has no logprob; leave it out")
        _check_range("prompt_logprobs_last_n", last_n, 1, len(prompt) - 1)
    return SampleRequest(
        prompt=prompt,
        num_samples=num_samples,
        params=params,
        prompt_logprobs=bool(asked.prompt_logprobs),
        topk_prompt_logprobs=topk_prompt,
        topk_sample_logprobs=topk_sample,
        prompt_logprobs_last_n=last_n,
    )


def _check_offered(asked: AsampleRequest) -> None:
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(asked, name):
            raise InvalidRequest(f"{name} is not offered by this weft; leave it out")


def _params(asked: JsonSamplingParams, facts: BaseModelFacts) -> SamplingParams:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    top_k = -1 if asked.top_k is None else asked.top_k
    if not math.isfinite(temperature) or temperature < 0:
        raise InvalidRequest("sampling_params.temperature must be a finite number of 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise InvalidRequest(f"sampling_params.top_p must be above 0 and at most 1; got {top_p}")
    if not -1 <= top_k <= MAX_TOP_K:
        raise InvalidRequest(f"sampling_params.top_k must be 1 to {MAX_TOP_K}, or -1 for off; got {top_k}")
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise InvalidRequest(f"sampling_params.max_tokens must be 1 or more; got {asked.max_tokens}")
    if asked.seed is not None and not -(2**63) <= asked.seed < 2**64:
        raise InvalidRequest("sampling_params.seed must fit 64 bits")
    strings, tokens = _stops(asked.stop, facts)
    return SamplingParams(
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        stop_strings=strings,
        stop_tokens=tokens,
        temperature=temperature,
        top_k=top_k or -1,
        top_p=top_p,
    )


def _stops(
    stop: str | list[str] | list[int] | None, facts: BaseModelFacts
) -> tuple[list[str] | None, list[int] | None]:
    """Stop strings and stop tokens; both None for an absent ``stop``, both empty for ``[]``."""
    if stop is None:
        return None, None
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"sampling_params.stop has {len(stops)} entries; at most {MAX_STOPS}")
    strings = [entry for entry in stops if isinstance(entry, str)]
    tokens = [entry for entry in stops if isinstance(entry, int)]
    if any(not entry for entry in strings):
        raise InvalidRequest("sampling_params.stop has an empty string; leave it out")
    if any(not 0 <= entry < facts.vocabulary_size for entry in tokens):
        raise InvalidRequest(f"sampling_params.stop: token ids must be 0 to {facts.vocabulary_size - 1}")
    return strings, tokens


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{field} must be {low} to {high}; got {value}")
