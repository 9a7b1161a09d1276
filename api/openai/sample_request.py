"""Conversion of OpenAI's request fields to the ``SampleRequest`` record that the ledger stores."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from api.openai.logit_rules import logit_rules
from api.wire.openai_requests import GenerationRequest
from api.wire.sample_checks import check_sample
from api.wire.token_ids import array_of
from contracts.base_model import BaseModelFacts
from contracts.operations import SampleRequest, SamplingParams
from contracts.vocabulary import BaseVocabulary
from store.settings import Settings


def sample_request(
    asked: GenerationRequest,
    prompt: Sequence[int],
    facts: BaseModelFacts,
    vocabulary: BaseVocabulary,
    settings: Settings,
) -> SampleRequest:
    """Return the checked payload for one prompt. Raises ``InvalidRequest`` naming OpenAI's field."""
    names, stops = asked.field_names, asked.stops
    params = SamplingParams(
        max_tokens=asked.token_limit,
        seed=asked.seed,
        stop_strings=stops or None,
        stop_tokens=[] if stops else None,
        temperature=asked.temperature,
        top_k=asked.top_k or -1,
        top_p=asked.top_p,
    )
    sample = SampleRequest(
        prompt=array_of(prompt, names.get("prompt", "prompt")),
        num_samples=asked.n,
        params=params,
        topk_sample_logprobs=asked.alternatives,
        prompt_logprobs=asked.scores_prompt,
        topk_prompt_logprobs=asked.alternatives if asked.scores_prompt else 0,
        logit_rules=logit_rules(asked, facts, settings),
    )
    check_sample(sample, facts, settings, names)
    if sample.in_one_piece and params.seed is None:
        # A sample that begins anew shall say what it has said before, also to the reader of a stream.
        params = replace(params, seed=secrets.randbits(63))
    ends = vocabulary.end_of_sequence_ids
    if sample.logit_rules is not None and sample.logit_rules.grammar is not None:
        # After the form's end these are the only tokens that are left.
        params = replace(params, stop_strings=stops, stop_tokens=sorted(ends | vocabulary.end_of_text_ids))
    elif stops:
        # OpenAI's stop strings add to the model's own end of sequence; the Tinker API's replace it.
        params = replace(params, stop_tokens=sorted(ends))
    return replace(sample, params=params)
