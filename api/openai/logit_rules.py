"""OpenAI's penalties, ``logit_bias`` and forms of the text, as the rules that a sampler follows."""

from collections.abc import Mapping

from api.wire.openai_requests import GenerationRequest
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.logit_rules import MAX_BIAS, MAX_PENALTY, MOST_BIASES, LogitRules
from store.sampled_bases import samples_on_vllm
from store.settings import Settings


def logit_rules(asked: GenerationRequest, facts: BaseModelFacts, settings: Settings) -> LogitRules | None:
    """Return the rules that ``asked`` names, None for none. Raises ``InvalidRequest`` naming OpenAI's field."""
    rules = LogitRules(
        _penalty(asked.frequency_penalty, "frequency_penalty"),
        _penalty(asked.presence_penalty, "presence_penalty"),
        _biases(asked.logit_bias, facts),
        asked.grammar,
    )
    if rules == LogitRules():
        return None
    if not samples_on_vllm(settings, facts.name):
        raise InvalidRequest(
            f"{_name(rules, asked)} is offered where vLLM samples the base only, and weft itself samples {facts.name}: leave "
            "it out, or ask the operator for vLLM servers"
        )
    if rules.grammar is not None and asked.wants_logprobs:
        raise InvalidRequest(
            f"logprobs do not come with {asked.grammar_field}: those of the tokens that it rules out are not the model's; leave "
            "one of them out"
        )
    return rules


def _name(rules: LogitRules, asked: GenerationRequest) -> str:
    if rules.grammar is not None:
        return asked.grammar_field
    if rules.biases:
        return "logit_bias"
    return "frequency_penalty" if rules.frequency_penalty else "presence_penalty"


def _penalty(value: float, name: str) -> float:
    if not -MAX_PENALTY <= value <= MAX_PENALTY:
        raise InvalidRequest(f"{name} must be {-MAX_PENALTY:g} to {MAX_PENALTY:g}; got {value:g}")
    return value


def _biases(asked: Mapping[str, float], facts: BaseModelFacts) -> list[tuple[int, float]]:
    if len(asked) > MOST_BIASES:
        raise InvalidRequest(f"logit_bias has {len(asked)} tokens; send at most {MOST_BIASES}")
    found: dict[int, float] = {}
    for text, bias in asked.items():
        # Longer than any vocabulary's ids: nothing is made of such a text.
        token = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
        if not 0 <= token < facts.vocabulary_size:
            raise InvalidRequest(f"logit_bias: {text[:20]!r} is no token id; they are 0 to {facts.vocabulary_size - 1}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(f"logit_bias of token {token} must be {-MAX_BIAS:g} to {MAX_BIAS:g}; got {bias:g}")
        found[token] = bias
    return sorted(found.items())
