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
_FEWEST_RESUMED = 16
"""Fewest tokens whose text a resumed check reads."""


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

    def resume(self, tokens: list[int]) -> StopReason | None:
        """Take up a sequence that has not ended before the last of ``tokens``; return as ``after`` does for that one.

        Only the end of the sequence is decoded.
        """
        if not tokens:
            return None
        if self._text is not None:
            self._text.settle_at(tokens, len(tokens) - 1)
        return self.after(tokens)


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

    def settle_at(self, tokens: list[int], end: int) -> None:
        """Settle as if the tokens before ``end`` had come one by one, none of which completed a string."""
        settled = self._settled(tokens, end)
        self._new_start = self._settled(tokens, settled - 1)
        text, start, width = "", settled, _FEWEST_RESUMED
        while len(text) < self._overlap and start > 0:
            start = self._settled(tokens, settled - width)
            text = self._decode(tokens[start:settled])
            width *= 2
        self._settle(tokens, settled, text)

    def _settled(self, tokens: list[int], end: int) -> int:
        """Return the last place up to ``end`` where no character is unfinished, or one where the text counts as final."""
        for place in range(end, end - _MOST_UNSETTLED, -1):
            if place <= 0:
                return 0
            # A window that begins in the midst of a character may be broken as a whole.
            starts = range(place - 1, max(-1, place - 1 - _LONGEST_CHARACTER), -1)
            texts = (self._decode(tokens[start:place]) for start in starts)
            if any(text and not text.endswith(_UNFINISHED_CHARACTER) for text in texts):
                return place
        return end - _LONGEST_CHARACTER

    def _settle(self, tokens: list[int], end: int, text: str) -> None:
        """Settle the tokens before ``end``, whose text ends with ``text``, and start the next window there."""
        self._tail = text[-self._overlap :] if self._overlap else ""
        self._context_start, self._new_start = self._new_start, end
        self._context_text = self._decode(tokens[self._context_start : end])
