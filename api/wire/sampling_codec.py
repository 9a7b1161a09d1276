"""Conversion of Tinker's JSON sample request to the ``SampleRequest`` record that the ledger stores."""

from api.wire.model_input import tokens_of
from api.wire.sample_checks import FieldNames, check_sample
from api.wire.tinker_requests import AsampleRequest, JsonSamplingParams
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.operations import SampleRequest, SamplingParams
from store.settings import Settings

_NOT_OFFERED = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")
_FIELD_NAMES: FieldNames = {name: f"sampling_params.{name}" for name in JsonSamplingParams.model_fields}


def sample_request(asked: AsampleRequest, facts: BaseModelFacts, settings: Settings) -> SampleRequest:
    """Return the payload of ``asked``. Raises ``InvalidRequest`` naming the field and the limit."""
    for name in _NOT_OFFERED:
        if getattr(asked, name):
            raise InvalidRequest(f"{name} is not offered by this weft; leave it out")
    sample = SampleRequest(
        prompt=tokens_of(asked.prompt, "prompt", facts),
        num_samples=1 if asked.num_samples is None else asked.num_samples,
        params=_params(asked.sampling_params or JsonSamplingParams()),
        prompt_logprobs=bool(asked.prompt_logprobs),
        topk_prompt_logprobs=asked.topk_prompt_logprobs or 0,
        topk_sample_logprobs=asked.topk_sample_logprobs or 0,
        prompt_logprobs_last_n=asked.prompt_logprobs_last_n,
    )
    check_sample(sample, facts, settings, _FIELD_NAMES)
    return sample


def _params(asked: JsonSamplingParams) -> SamplingParams:
    strings, tokens = _stops(asked.stop)
    return SamplingParams(
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        stop_strings=strings,
        stop_tokens=tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=asked.top_k or -1,
        top_p=1.0 if asked.top_p is None else asked.top_p,
    )


def _stops(stop: str | list[str] | list[int] | None) -> tuple[list[str] | None, list[int] | None]:
    """Return stop strings and stop tokens: both None for an absent ``stop``, both empty for ``[]``."""
    if stop is None:
        return None, None
    stops = [stop] if isinstance(stop, str) else stop
    return [one for one in stops if isinstance(one, str)], [one for one in stops if isinstance(one, int)]
