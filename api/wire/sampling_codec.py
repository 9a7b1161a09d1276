"""Conversion of Tinker's JSON sample request to the ``SampleRequest`` record that the ledger stores."""

from api.wire.model_input import tokens_of
from api.wire.sample_checks import FieldNames, check_rows, check_sample
from api.wire.tensors import cells_from_lists
from api.wire.tinker_requests import AsampleRequest, JsonSamplingParams, JsonTensor
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.operations import SampleRequest, SamplingParams
from contracts.prompt_cells import PromptCells
from store.settings import Settings

_FIELD_NAMES: FieldNames = {name: f"sampling_params.{name}" for name in JsonSamplingParams.model_fields}


def sample_request(asked: AsampleRequest, facts: BaseModelFacts, settings: Settings) -> SampleRequest:
    """Return the payload of ``asked``. Raises ``InvalidRequest`` naming the field and the limit."""
    prompt = tokens_of(asked.prompt, "prompt", facts)
    sample = SampleRequest(
        prompt=prompt,
        num_samples=1 if asked.num_samples is None else asked.num_samples,
        params=_params(asked.sampling_params or JsonSamplingParams()),
        prompt_logprobs=bool(asked.prompt_logprobs),
        topk_prompt_logprobs=asked.topk_prompt_logprobs or 0,
        topk_sample_logprobs=asked.topk_sample_logprobs or 0,
        prompt_logprobs_last_n=asked.prompt_logprobs_last_n,
        target_prompt_logprobs=_targets(asked.target_prompt_logprobs, len(prompt) - 1),
        prompt_alt_tokens_k=asked.prompt_alt_tokens_k or 0,
        is_recorded=bool(asked.record_stability_info),
    )
    check_sample(sample, facts, settings, _FIELD_NAMES)
    return sample


def _targets(asked: JsonTensor | None, rows: int) -> PromptCells | None:
    if asked is None:
        return None
    field = "target_prompt_logprobs"
    if asked.dtype != "int64":
        raise InvalidRequest(f"{field}: dtype must be int64, as token ids are")
    if asked.shape and rows >= 0:
        # The sizes of the arrays follow from it.
        check_rows(asked.shape[0], rows, field)
    return cells_from_lists(asked.data, asked.shape, asked.sparse_crow_indices, asked.sparse_col_indices, field)


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
