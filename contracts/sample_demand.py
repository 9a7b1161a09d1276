"""Demand of a sample: what it may take at most, by which tenants' samples are bounded."""

from dataclasses import dataclass

from contracts.operations import SampleRequest


@dataclass(frozen=True, slots=True)
class SampleDemand:
    """Most that a sample can take.

    - ``tokens``: its prompt, and ``max_tokens`` for each sequence.
    - ``work``: num_samples x max_tokens x topk, the log-probabilities of its prompt, and the tokens drawn at its positions.
    """

    tokens: int
    work: int


def demand_of(sample: SampleRequest, context_length: int) -> SampleDemand:
    """Return the demand of ``sample`` on a base model with this context."""
    prompt = len(sample.prompt)
    longest = context_length - prompt if sample.params.max_tokens is None else sample.params.max_tokens
    drawn = sample.num_samples * max(longest, 1)
    scored = prompt * max(sample.topk_prompt_logprobs, int(sample.prompt_logprobs))
    targets = 0 if sample.target_prompt_logprobs is None else sample.target_prompt_logprobs.values.size
    alternatives = (prompt - 1) * sample.prompt_alt_tokens_k
    work = drawn * max(sample.topk_sample_logprobs, 1) + scored + targets + alternatives
    return SampleDemand(prompt + drawn, work)
