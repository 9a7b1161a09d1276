"""Stopping: text is found at the very token that completes it, however it is split."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from workers.sampling.stop_conditions import StopCheck, StopRules

MERGED = ["Ġt", "he", "Ġthe", "Ċ", "ing", "Ã©", "å"]


def byte_level_tokenizer() -> Tokenizer:
    """Bytes, and a few longer pieces, so that characters and words are split in many ways."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*alphabet, *MERGED]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_level_tokenizer()


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


def stops_after(tokens: list[int], strings: tuple[str, ...]) -> int | None:
    stop_check = StopCheck(StopRules(10**6, frozenset(), strings, decode))
    return next((end for end in range(1, len(tokens) + 1) if stop_check.after(tokens[:end]) == "stop"), None)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(alphabet=st.sampled_from("ab the\né日🎉in"), min_size=1, max_size=60), data=st.data())
def test_stops_at_the_first_token_that_completes_a_string(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    string = text[start : data.draw(st.integers(start + 1, min(len(text), start + 8)))]
    tokens = TOKENIZER.encode(text).ids
    naive = next(end for end in range(1, len(tokens) + 1) if string in decode(tokens[:end]))
    assert stops_after(tokens, ("never said", string)) == naive


@settings(max_examples=100)
@given(garbage=st.lists(st.integers(0, 255), max_size=80))
def test_a_string_is_found_after_broken_text(garbage: list[int]) -> None:
    tokens = garbage + TOKENIZER.encode("\n STOP é!").ids
    found = stops_after(tokens, ("STOP é",))
    assert found is not None
    assert "STOP é" in decode(tokens[:found])


def test_work_a_token_does_not_grow_with_the_length() -> None:
    longest = 0

    def measured(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    stop_check = StopCheck(StopRules(10**6, frozenset(), ("###",), measured))
    for tokens in (TOKENIZER.encode("the é日 thing " * 40).ids, [0xFF - 68] * 400):
        for end in range(1, len(tokens) + 1):
            stop_check.after(tokens[:end])
    assert longest <= 40


@pytest.mark.parametrize(
    ("tokens", "reason"), [([1, 7], "stop"), ([1, 2, 3], "length"), ([1, 2], None), ([1, 2, 7], "stop")]
)
def test_tokens_and_length(tokens: list[int], reason: str | None) -> None:
    assert StopCheck(StopRules(3, frozenset({7}), (), None)).after(tokens) == reason
