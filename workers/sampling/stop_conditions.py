"""Checks whether a sequence has ended: by a stop token, a stop string that may straddle tokens, or the length limit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

StopReason = Literal["stop", "length"]

_UNFINISHED_CHARACTER = "\ufffd"
_LONGEST_CHARACTER = 4
"""Most bytes of a UTF-8 character, so also the most tokens that can share a character."""
_MOST_UNSETTLED = 16
"""Tokens in a row that end in broken UTF-8 after which the text counts as final all the same."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rules that end every sequence of a request. ``decode`` (token ids to text) is needed only for ``strings``."""

    max_tokens: int
    tokens: frozenset[int]
    strings: tuple[str, ...]
    decode: Callable[[list[int]], str] | None


class StopCheck:
    """Check of one growing sequence against ``StopRules``."""

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules
        self._text = _TextTail(rules.decode, rules.strings) if rules.strings and rules.decode else None

    def after(self, tokens: list[int]) -> StopReason | None:
        """Return why the sequence ends with the last of ``tokens``, or None. Call it for each new token with all so far."""
        if tokens[-1] in self._rules.tokens:
            return "stop"
        if self._text is not None and self._text.contains_stop(tokens):
            return "stop"
        return "length" if len(tokens) >= self._rules.max_tokens else None


class _TextTail:
    """Text of the end of a growing sequence, decoded a few tokens at a time.

    Two neighbouring windows are decoded in one call, because the text of a token can depend on the token before it
    (leading spaces, split characters). The text of the first window is then cut off. The work for each token does not
    depend on the length of the sequence.
    """

    def __init__(self, decode: Callable[[list[int]], str], strings: tuple[str, ...]) -> None:
        self._decode = decode
        self._strings = strings
        self._overlap = max(map(len, strings)) - 1
        self._context_start = 0
        self._new_start = 0
        self._context_text = ""
        self._tail = ""

    def contains_stop(self, tokens: list[int]) -> bool:
        window = self._decode(tokens[self._context_start :])
        text = self._tail + window[len(self._context_text) :]
        if any(string in text for string in self._strings):
            return True
        if not window.endswith(_UNFINISHED_CHARACTER):
            self._settle(tokens, len(tokens), text)
        elif len(tokens) - self._new_start >= _MOST_UNSETTLED:
            settled = len(tokens) - _LONGEST_CHARACTER
            window = self._decode(tokens[self._context_start : settled])
            self._settle(tokens, settled, self._tail + window[len(self._context_text) :])
        return False

    def _settle(self, tokens: list[int], end: int, text: str) -> None:
        """Settle the tokens before ``end``, whose text ends with ``text``, and start the next window there."""
        self._tail = text[-self._overlap :] if self._overlap else ""
        self._context_start, self._new_start = self._new_start, end
        self._context_text = self._decode(tokens[self._context_start : end])
