"""Conversion of a growing sequence of tokens to text: whole characters, without special tokens and stop strings."""

from collections.abc import Callable, Sequence

_UNFINISHED_CHARACTER = "\ufffd"
_LONGEST_CHARACTER = 4
"""Most bytes of a UTF-8 character, so also the most tokens that can share a character."""
_MOST_UNSETTLED = 16
"""Tokens that end in broken UTF-8 after which the text before the last of them counts as final all the same."""


class TextStream:
    """Turns the growing tokens of one sequence into text and gives out each character once.

    A token's text can depend on the token before it. So two neighbouring windows of tokens are decoded at once, and the
    work for a token does not grow with the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], special_ids: frozenset[int], stops: Sequence[str]) -> None:
        """``decode`` turns token ids into text; ``stops`` are the stop strings."""
        self._decode = decode
        self._special_ids = special_ids
        self._stops = stops
        self._tokens: list[int] = []
        self._context = self._new = 0
        self._held = ""
        self._has_stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is safe to send; hold back a possible stop string or an unfinished character."""
        said = ""
        for token in tokens:
            if token not in self._special_ids:
                self._tokens.append(token)
            elif self._held or self._new < len(self._tokens):
                said += self._push() + self._seal()
        return said + self._push()

    def _seal(self) -> str:
        """Return all text so far: a special token follows, and the sampler finds no stop string across one."""
        before = self._decode(self._tokens[self._context : self._new])
        self._settle(self._decode(self._tokens[self._context :])[len(before) :], len(self._tokens))
        return self._release(keep=0)

    def _push(self) -> str:
        before = self._decode(self._tokens[self._context : self._new])
        window = self._decode(self._tokens[self._context :])
        if not window.endswith(_UNFINISHED_CHARACTER):
            self._settle(window[len(before) :], len(self._tokens))
        elif len(self._tokens) - self._new >= _MOST_UNSETTLED:
            place, text = self._boundary(window)
            self._settle(text[len(before) :], place)
        return self._release(keep=self._unsettled())

    def end(self) -> str:
        """Return the rest of the text; no token follows."""
        before = self._decode(self._tokens[self._context : self._new])
        self._held += self._decode(self._tokens[self._context :])[len(before) :]
        self._context = self._new = len(self._tokens)
        return self._release(keep=0)

    def _settle(self, text: str, place: int) -> None:
        """Take ``text`` as that of the new tokens before ``place``, where the next window begins."""
        self._held += text
        self._context, self._new = self._new, place

    def _boundary(self, window: str) -> tuple[int, str]:
        """Return a place between two characters, before any that may go on, and the text of ``window`` before it."""
        last = len(self._tokens) - _LONGEST_CHARACTER
        texts = [self._decode(self._tokens[self._context : last - back]) for back in range(_LONGEST_CHARACTER)]
        # The text before a place within a character ends in a broken one, which the window has whole.
        back = next((back for back, text in enumerate(texts) if window.startswith(text)), 0)
        return last - back, texts[back]

    def _unsettled(self) -> int:
        """Return the number of characters at the end that may begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, *, keep: int) -> str:
        if self._has_stopped:
            self._held = ""
            return ""
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._has_stopped = True
            said, self._held = self._held[: min(places)], ""
            return said
        end = len(self._held) - keep
        said, self._held = self._held[:end], self._held[end:]
        return said
