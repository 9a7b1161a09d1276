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


BYTE_PIECES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "b", "é", "日", "▁日", "in"]


def sentence_piece_tokenizer() -> Tokenizer:
    """Pieces and bytes as of Llama 2: the first space of a text is stripped, bytes in a row are text all together or not."""
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(BYTE_PIECES)}, merges=[]))
    stripped = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), stripped]
    )
    return tokenizer


SENTENCE_PIECES = sentence_piece_tokenizer()


def decode_pieces(ids: list[int]) -> str:
    return str(SENTENCE_PIECES.decode(ids, skip_special_tokens=False))


def piece_tokens(text: str) -> list[int]:
    """Return the bytes of each character that is no piece, and the others' pieces."""
    pieces = [[BYTE_PIECES.index(one)] if one in BYTE_PIECES else [byte + 1 for byte in one.encode()] for one in text]
    return [token for piece in pieces for token in piece]


TEXTS = st.text(alphabet=st.sampled_from("ab the\né日🎉in▁"), min_size=1, max_size=60)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXTS, broken=st.lists(st.integers(0, 255), max_size=24), is_byte_level=st.booleans(), data=st.data())
def test_a_resumed_check_stops_where_one_stops_that_saw_each_token(
    text: str, broken: list[int], is_byte_level: bool, data: st.DataObject
) -> None:
    """The cut is anywhere, also within a character, a stop string or broken text.

    Where bytes in a row are text all together or not, text beside broken bytes is found by some cuts only.
    """
    start = data.draw(st.integers(0, len(text) - 1))
    string = text[start : data.draw(st.integers(start + 1, min(len(text), start + 24)))]
    tokens = TOKENIZER.encode(text).ids if is_byte_level else piece_tokens(text)
    at = data.draw(st.integers(0, len(tokens)))
    tokens = [*tokens[:at], *(broken if is_byte_level else []), *tokens[at:]]
    rules = StopRules(
        10**6, frozenset({5}), (string, "never said, and long" * 2), decode if is_byte_level else decode_pieces
    )
    replayed, resumed = StopCheck(rules), StopCheck(rules)
    cut = data.draw(st.integers(0, len(tokens)))
    reason = None
    for end in range(1, cut + 1):
        reason = replayed.after(tokens[:end])
        if reason is not None:
            cut = end
            break
    assert resumed.resume(tokens[:cut]) == reason
    for end in range(cut + 1, len(tokens) + 1):
        if reason is not None:
            break
        reason = replayed.after(tokens[:end])
        assert resumed.after(tokens[:end]) == reason


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
