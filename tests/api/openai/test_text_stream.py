"""Text that grows token by token is the text of all tokens, without what must not be said."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.openai.text_stream import TextStream

END = 256
SPECIAL = frozenset({END, 257})


def decode(tokens: list[int]) -> str:
    """Decode as the tiny tokenizer does: ids are bytes, and broken ones show as such."""
    return bytes(tokens).decode(errors="replace")


def said(tokens: list[int], stops: list[str], cuts: list[int]) -> tuple[str, list[str]]:
    """The whole text, and its parts when the tokens come cut at these places."""
    stream = TextStream(decode, SPECIAL, stops)
    places = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    parts = [stream.push(tokens[start:end]) for start, end in pairwise(places)]
    parts.append(stream.end())
    return "".join(parts), parts


texts = st.text(st.sampled_from("ab€é😀\n "), max_size=30)


@given(texts, st.lists(st.integers(0, 200), max_size=8))
def test_parts_add_up_to_the_text_however_it_is_cut(text: str, cuts: list[int]) -> None:
    whole, parts = said([*text.encode(), END], [], cuts)
    assert whole == text
    assert not any("\ufffd" in part for part in parts)


@given(
    texts, st.lists(st.sampled_from(["a", "ab", "€b", "aba", "\n ", "😀"]), max_size=3), st.lists(st.integers(0, 99))
)
def test_nothing_of_a_stop_string_is_said_nor_what_follows(text: str, stops: list[str], cuts: list[int]) -> None:
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    whole, _ = said(list(text.encode()), stops, cuts)
    assert whole == text[: min(places, default=len(text))]


def test_what_may_become_a_stop_string_waits_and_is_said_when_it_does_not() -> None:
    stream = TextStream(decode, SPECIAL, ["stop"])
    assert stream.push(list(b"a sto")) == "a "
    assert stream.push(list(b"ne ")) == "stone "
    assert stream.push(list(b"st")) == ""
    assert stream.end() == "st"


def test_special_tokens_are_left_out_and_broken_characters_shown_at_the_end() -> None:
    stream = TextStream(decode, SPECIAL, [])
    assert stream.push([257, *b"hi", END]) == "hi"
    assert stream.push([0xE2, 0x82]) == ""
    assert stream.end() == "\ufffd"


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4]])
def test_a_stop_string_across_a_special_token_is_none(cuts: list[int]) -> None:
    """The sampler reads the special token's text between, goes on, and what follows is said."""
    assert said([*b"xa", END, *b"bcab", *b"d"], ["ab"], cuts)[0] == "xabc"
    assert said([*b"xa", END, *b"bc"], ["ab"], cuts)[0] == "xabc"
    assert said([*b"xab", END, *b"bc"], ["ab"], cuts)[0] == "x"


@given(st.lists(st.sampled_from(list("aé€😀".encode())), max_size=80), st.lists(st.integers(0, 99), max_size=12))
def test_broken_text_is_said_as_it_is_however_it_is_cut(tokens: list[int], cuts: list[int]) -> None:
    assert said(tokens, [], cuts)[0] == decode(tokens)
    assert said(tokens, [], list(range(len(tokens))))[0] == decode(tokens)


@pytest.mark.parametrize("tokens", [[0xC3] * 2000, [0xF0, 0x9F] * 1000, list("é日".encode()) * 400])
def test_the_work_of_a_token_does_not_grow_with_a_text_that_never_settles(tokens: list[int]) -> None:
    decoded = 0

    def counted(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    stream = TextStream(counted, SPECIAL, ["never said"])
    parts = [stream.push([token]) for token in tokens]
    assert decoded <= 64 * len(tokens)
    assert "".join([*parts, stream.end()]) == decode(tokens)
    assert len("".join(parts)) > len(decode(tokens)) - 32, "it is told as it comes"
