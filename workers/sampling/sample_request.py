"""What a ``sample`` operation asks for, checked against its base, and when its sequences end. Needs no torch."""

from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.operations import SampleRequest
from contracts.vocabulary import BaseVocabulary
from engine.sampling.request_checks import check_choice, check_prompt
from workers.sampling.stop_conditions import StopRules


def stop_rules(sample: SampleRequest, facts: BaseModelFacts, vocabulary: BaseVocabulary) -> StopRules:
    """Check ``sample`` and say when its sequences end, with the base's own rules where it gives none.

    Raises ``InvalidRequest`` for a prompt that is empty, too long or has foreign tokens, for numbers out of range and
    for stop strings without a tokenizer.
    """
    params = sample.params
    # At least one token must fit, however many are asked for.
    check_prompt(sample.prompt, 1 if params.max_tokens is None else params.max_tokens, facts)
    check_choice(params.temperature, params.top_p)
    if sample.num_samples < 1:
        raise InvalidRequest("num_samples must be at least 1")
    strings = tuple(params.stop_strings or ())
    if not all(strings):
        raise InvalidRequest("stop: a stop string must not be empty")
    if strings and vocabulary.decode is None:
        raise InvalidRequest("stop: this base model has no tokenizer, so give stop token ids instead of text")
    stops_by_default = params.stop_strings is None and params.stop_tokens is None
    return StopRules(
        max_tokens=facts.context_length - len(sample.prompt) if params.max_tokens is None else params.max_tokens,
        tokens=vocabulary.end_of_sequence_ids if stops_by_default else frozenset(params.stop_tokens or ()),
        strings=strings,
        decode=vocabulary.decode if strings else None,
    )
