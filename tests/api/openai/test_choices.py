"""Log-probabilities of finished sequences in OpenAI's two forms."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson

from api.openai.choices import chat_logprobs, completion_logprobs, prompt_logprobs
from api.openai.generation import Generation
from contracts.operations import EMPTY_LOGPROB, SampleOutput, TopkLogprobs
from engine.sampling.vocabulary import read_vocabulary

GENERATION = cast("Generation", SimpleNamespace(decode=lambda tokens: "abc"[tokens[0]]))
TOKENS, LOGPROBS = [2, 0], [-0.5, -0.25]
TABLE = TopkLogprobs(np.array([[2, 1], [0, 1]]), np.array([[-0.5, -1.0], [-0.25, EMPTY_LOGPROB]]))


def entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": [ord(token)]}


def test_each_tokens_alternatives_are_encoded_by_themselves() -> None:
    """The answer is put together in one step, in which no other thread runs. So nothing long is left to it."""
    chat = chat_logprobs(GENERATION, TOKENS, LOGPROBS, TABLE)
    plain = completion_logprobs(GENERATION, TOKENS, LOGPROBS, topk=TABLE)
    parts = [*(one["top_logprobs"] for one in chat["content"]), *plain["top_logprobs"]]
    assert [type(part) for part in parts] == [orjson.Fragment] * 4

    assert orjson.loads(orjson.dumps(chat))["content"] == [
        {**entry("c", -0.5), "top_logprobs": [entry("c", -0.5), entry("b", -1.0)]},
        {**entry("a", -0.25), "top_logprobs": [entry("a", -0.25)]},
    ]
    assert orjson.loads(orjson.dumps(plain))["top_logprobs"] == [{"c": -0.5, "b": -1.0}, {"a": -0.25}]


def test_a_piece_of_a_stream_has_no_alternatives() -> None:
    assert chat_logprobs(GENERATION, TOKENS[:1], LOGPROBS[:1])["content"] == [{**entry("c", -0.5), "top_logprobs": []}]
    assert completion_logprobs(GENERATION, TOKENS, LOGPROBS)["top_logprobs"] is None


def test_an_echoed_prompts_first_token_has_no_logprob() -> None:
    output = SampleOutput([], prompt_logprobs=np.array([np.nan, -0.25]), topk_prompt_logprobs=TABLE)
    told = prompt_logprobs(GENERATION, TOKENS, output)
    assert (told["token_logprobs"], told["text_offset"]) == ([None, -0.25], [0, 1])
    assert orjson.loads(orjson.dumps(told["top_logprobs"])) == [None, {"a": -0.25}]


def test_an_echoed_prompts_offsets_are_those_of_the_text_that_was_sent() -> None:
    """The tokenizer has put a token first, whose text is not in it."""
    generation = cast(
        "Generation", SimpleNamespace(decode=lambda tokens: "".join(("<s>", "ab", "c")[one] for one in tokens))
    )
    output = SampleOutput([], prompt_logprobs=np.array([np.nan, -0.25, -0.5]))
    assert prompt_logprobs(generation, [0, 1, 2], output, "abc")["text_offset"] == [0, 0, 2]
    assert prompt_logprobs(generation, [0, 1, 2], output, "<s>abc")["text_offset"] == [0, 3, 5]


def test_a_part_of_a_character_has_its_own_bytes(tiny_model_dir: Path) -> None:
    vocabulary = read_vocabulary(tiny_model_dir)
    generation = cast("Generation", SimpleNamespace(decode=vocabulary.decode, vocabulary=vocabulary))
    assert vocabulary.encode is not None
    tokens = vocabulary.encode("a\u00e9\u20ac")
    told = chat_logprobs(generation, tokens, [-1.0] * len(tokens))["content"]
    assert bytes(byte for one in told for byte in one["bytes"]).decode() == "a\u00e9\u20ac"
    assert {"\ufffd"} < {one["token"] for one in told}
    unknown = replace(vocabulary, token_bytes=None)
    generation = cast("Generation", SimpleNamespace(decode=vocabulary.decode, vocabulary=unknown))
    told = chat_logprobs(generation, tokens, [-1.0] * len(tokens))["content"]
    assert all((one["bytes"] is None) == (one["token"] == "\ufffd") for one in told)


def test_the_likeliest_of_alternatives_with_one_text_is_told() -> None:
    generation = cast("Generation", SimpleNamespace(decode=lambda tokens: "a" if tokens[0] == 2 else "\ufffd"))
    table = TopkLogprobs(np.array([[0, 1, 2]]), np.array([[-0.5, -1.0, -2.0]]))
    told = completion_logprobs(generation, [0], [-0.5], topk=table)["top_logprobs"]
    assert orjson.loads(orjson.dumps(told)) == [{"\ufffd": -0.5, "a": -2.0}]
