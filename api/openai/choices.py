"""Text, tool calls, logprobs and token counts of an OpenAI answer, for finished sequences and for pieces of a stream."""

import math
from collections.abc import Sequence
from typing import Any

import orjson

from api.openai.generation import Generation
from api.openai.text_stream import TextStream
from api.openai.tool_calls import Said, ToolCallReader
from contracts.operations import EMPTY_LOGPROB, SampleOutput, TopkLogprobs

_PARTIAL = "\ufffd"
"""Text of bytes that are no whole character."""


class ChoiceText:
    """Text and tool calls of one sequence of ``generation``, as its tokens come.

    With ``tells_arguments`` a call is told before it is whole; see ``ToolCallReader``.
    """

    def __init__(self, generation: Generation, *, tells_arguments: bool = False) -> None:
        self._text = TextStream(generation.decode, generation.vocabulary.special_ids, generation.asked.stops)
        self._calls = ToolCallReader(generation.asked.most_calls, tells_arguments=tells_arguments)

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._calls.calls

    def push(self, tokens: Sequence[int]) -> Said:
        """Return what is certain to be said after ``tokens``."""
        return self._calls.push(self._text.push(tokens))

    def end(self) -> Said:
        """Return the rest; no token follows."""
        said = self._calls.push(self._text.end())
        said.go_on(self._calls.end())
        return said


def whole_text(generation: Generation, tokens: Sequence[int]) -> Said:
    """Return the text and the calls of a finished sequence."""
    text = ChoiceText(generation)
    said = text.push(tokens)
    said.go_on(text.end())
    return said


def finish_reason(stop_reason: str, calls: int) -> str:
    """Return OpenAI's reason for the end of a sequence with so many tool calls."""
    return "tool_calls" if calls and stop_reason == "stop" else stop_reason


def usage(generation: Generation, completion_tokens: int) -> dict[str, int]:
    """Return the ``usage`` object: tokens of the prompts, of the answers and of both."""
    prompt = generation.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
    }


def chat_logprobs(
    generation: Generation, tokens: Sequence[int], logprobs: Sequence[float], topk: TopkLogprobs | None = None
) -> dict[str, Any]:
    """Return a chat choice's ``logprobs``. Alternatives, ``topk``, are there only for a whole sequence that asked for them."""
    content = []
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        likeliest = _encoded([_entry(generation, *pair) for pair in _likeliest(topk, place)])
        content.append({**_entry(generation, token, logprob), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def completion_logprobs(
    generation: Generation,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    *,
    offset: int = 0,
    topk: TopkLogprobs | None = None,
) -> dict[str, Any]:
    """Return a completion choice's ``logprobs``; ``offset`` is the character at which the tokens' text begins."""
    texts = [generation.decode([token]) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    likeliest = [_encoded(_by_text(generation, _likeliest(topk, place))) for place in range(len(tokens))]
    return {
        "tokens": texts,
        "token_logprobs": list(logprobs),
        "top_logprobs": None if topk is None else likeliest,
        "text_offset": offsets,
    }


def prompt_logprobs(
    generation: Generation, prompt: Sequence[int], output: SampleOutput, shown: str | None = None
) -> dict[str, Any]:
    """Return the ``logprobs`` of an echoed prompt, of which ``shown`` is told. Its first token has none: null."""
    scores = [] if output.prompt_logprobs is None else output.prompt_logprobs.tolist()
    known = [None if math.isnan(score) else score for score in scores]
    told = completion_logprobs(generation, prompt, known, topk=output.topk_prompt_logprobs)
    # What the tokenizer puts first is not in the text that was sent.
    hidden = 0 if shown is None else max(0, len(generation.decode(list(prompt))) - len(shown))
    told["text_offset"] = [max(0, offset - hidden) for offset in told["text_offset"]]
    if told["top_logprobs"]:
        told["top_logprobs"][0] = None
    return told


def _entry(generation: Generation, token: int, logprob: float) -> dict[str, Any]:
    text = generation.decode([token])
    return {"token": text, "logprob": logprob, "bytes": _bytes(generation, token, text)}


def _bytes(generation: Generation, token: int, text: str) -> list[int] | None:
    """Return the token's own bytes, None where they are unknown. Of a part of a character ``text`` does not tell them."""
    if _PARTIAL not in text:
        return list(text.encode())
    known = generation.vocabulary.token_bytes
    found = None if known is None else known(token)
    return None if found is None else list(found)


def _by_text(generation: Generation, likeliest: list[tuple[int, float]]) -> dict[str, float]:
    """Return the log-probability of each text; the likeliest token's where several have one, as parts of characters do."""
    found: dict[str, float] = {}
    for token, logprob in likeliest:
        text = generation.decode([token])
        found[text] = max(logprob, found.get(text, logprob))
    return found


def _encoded(likeliest: list[dict[str, Any]] | dict[str, float]) -> Any:
    """Return a token's alternatives as JSON: to encode those of all tokens at once holds every other thread up."""
    return orjson.Fragment(orjson.dumps(likeliest)) if likeliest else likeliest


def _likeliest(topk: TopkLogprobs | None, place: int) -> list[tuple[int, float]]:
    if topk is None:
        return []
    cells = zip(topk.token_ids[place].tolist(), topk.logprobs[place].tolist(), strict=True)
    return [(token, logprob) for token, logprob in cells if logprob != EMPTY_LOGPROB]
