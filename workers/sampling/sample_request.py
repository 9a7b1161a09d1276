"""Check of a sample request against its base model, and the rules that end its sequences. Imports no torch."""

from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.operations import SampleRequest
from contracts.vocabulary import BaseVocabulary
from engine.sampling.request_checks import check_choice, check_prompt
from workers.sampling.stop_conditions import StopRules


def stop_rules(sample: SampleRequest, facts: BaseModelFacts, vocabulary: BaseVocabulary) -> StopRules:
    """Check ``sample`` and return the rules that end its sequences: its own, or the base model's where it has none.

    Raises ``InvalidRequest`` for a prompt that is empty, too long or has tokens outside the vocabulary, for numbers out of
    range, and for stop strings when the base model has no tokenizer.
    """
    params = sample.params
    # At least one new token must fit, even when no limit is given.
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
        max_tokens=max(1, facts.context_length - len(sample.prompt))
        if params.max_tokens is None
        else params.max_tokens,
        tokens=vocabulary.end_of_sequence_ids if stops_by_default else frozenset(params.stop_tokens or ()),
        strings=strings,
        decode=vocabulary.decode if strings else None,
    )
