"""Tool calls in the text of an answer: ``<tool_call>`` JSON ``</tool_call>``, as Hermes and Qwen models write them."""

import re
from dataclasses import dataclass, field
from typing import Final

import orjson

BEGIN, END = "<tool_call>", "</tool_call>"
_LONGEST_OPENING: Final = 512
"""Characters after ``BEGIN`` within which a call's arguments must begin for them to be told as they come."""
_OPENING = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(slots=True)
class CallDelta:
    """News of the call number ``index`` of an answer: its ``name`` where it begins, and more of its arguments."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Said:
    """New text of an answer, and news of its calls, one for each."""

    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, part: CallDelta) -> None:
        """Add news of a call to what is said of it already."""
        if self.calls and self.calls[-1].index == part.index:
            self.calls[-1].arguments += part.arguments
        else:
            self.calls.append(part)

    def go_on(self, later: "Said") -> None:
        """Add what is said after this."""
        self.text += later.text
        for part in later.calls:
            self.add(part)


class ToolCallReader:
    """Splits the growing text of one answer into plain text and calls.

    Space around calls is dropped. A call that is broken off, or is no JSON of a call, is plain text.
    """

    def __init__(self, most_calls: int, *, tells_arguments: bool = False) -> None:
        """Read ``most_calls`` calls and drop any further; 0 takes all text as it is.

        With ``tells_arguments`` a call is told as soon as its arguments begin, and these as they come. From then on it is a
        call, whatever becomes of it. Only a call whose arguments do not follow its name is told once it is whole.
        """
        self._most_calls = most_calls
        self._tells_arguments = tells_arguments
        self._held = ""
        self._searched = 0
        """Index in what is held before which no call ends."""
        self._is_after_call = False
        self._arguments: _Arguments | None = None
        """Arguments of the call that is being told; None outside of such a call."""
        self.calls = 0
        """Number of calls so far, without dropped ones."""

    def push(self, text: str) -> Said:
        """Return what is certain after ``text``; the beginning of a possible call is held back."""
        if not self._most_calls:
            return Said(text)
        self._held += text
        said = Said()
        while self._find(said) if self._arguments is None else self._pass_on(said, self._arguments):
            pass
        return said

    def end(self) -> Said:
        """Return the rest; no text follows."""
        said = Said()
        if self._arguments is not None:
            _tell(said, self._arguments, self._held)
            self._held = ""
        self._say(said, len(self._held))
        return said

    def _find(self, said: Said) -> bool:
        """Look for the next call in what is held; return whether one was found, or text that is none."""
        begin = self._held.find(BEGIN)
        if begin < 0:
            self._say(said, len(self._held) - self._unsettled())
            return False
        start = begin + len(BEGIN)
        end = self._held.find(END, max(start, self._searched))
        if (opening := self._opening(start, len(self._held) if end < 0 else end)) is not None:
            name, arguments = opening
            self._open(said, begin, arguments)
            self._arguments = _Arguments(self._begun(said, name, ""))
            return True
        if end < 0:
            self._say(said, len(self._held[:begin].rstrip()))
            self._searched = max(0, len(self._held) - len(END) + 1)
            return False
        call = _call(self._held[start:end])
        if call is None:
            self._searched = 0
            self._say(said, end + len(END))
        else:
            self._open(said, begin, end + len(END))
            self._begun(said, call.name, call.arguments)
        return True

    def _opening(self, start: int, stop: int) -> tuple[str, int] | None:
        """Return a call's name and where its arguments begin, if it is to be told before it is whole."""
        if not self._tells_arguments:
            return None
        found = _OPENING.match(self._held, start, min(stop, start + _LONGEST_OPENING))
        name = None if found is None else _text(found[1])
        return None if found is None or name is None else (name, found.end())

    def _open(self, said: Said, begin: int, after: int) -> None:
        """Say what is before a call's mark at ``begin``, and drop the text from there to ``after``."""
        before = len(self._held[:begin].rstrip())
        self._say(said, before)
        self._held = self._held[after - before :]
        self._searched = 0
        self._is_after_call = True

    def _begun(self, said: Said, name: str, arguments: str) -> int | None:
        """Tell of a new call and return its number; None for a call that is dropped."""
        if self.calls == self._most_calls:
            return None
        said.add(CallDelta(self.calls, name, arguments))
        self.calls += 1
        return self.calls - 1

    def _pass_on(self, said: Said, arguments: "_Arguments") -> bool:
        """Tell more of the open call's arguments; return whether the call has ended."""
        end = self._held.find(END)
        settled = end if end >= 0 else len(self._held) - _begins(END, self._held)
        _tell(said, arguments, self._held[:settled])
        self._held = self._held[settled:]
        if end < 0:
            return False
        self._held = self._held[len(END) :]
        self._arguments = None
        return True

    def _say(self, said: Said, length: int) -> None:
        """Say the first ``length`` characters of what is held."""
        text, self._held = self._held[:length], self._held[length:]
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._is_after_call = False
            said.text += text

    def _unsettled(self) -> int:
        """Return the number of characters at the end that are space before a call, or the beginning of one."""
        settled = len(self._held) - _begins(BEGIN, self._held)
        return len(self._held) - len(self._held[:settled].rstrip())


class _Arguments:
    """The JSON object that a call's text goes on with: what belongs to it, up to the brace that closes it."""

    _MARKS = re.compile(r'[{}"]')
    _IN_STRING = re.compile(r'\\.|"', re.DOTALL)

    def __init__(self, index: int | None) -> None:
        """Read the arguments of call number ``index``, None for one that is dropped."""
        self.index = index
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._has_ended = False

    def take(self, text: str) -> str:
        """Return the part of ``text`` that belongs to the object."""
        if self._has_ended or not text:
            return ""
        place, self._is_escaped = (1, False) if self._is_escaped else (0, False)
        while (mark := (self._IN_STRING if self._is_in_string else self._MARKS).search(text, place)) is not None:
            place = mark.end()
            if mark[0] == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string:
                self._depth += 1 if mark[0] == "{" else -1
            if self._depth == 0:
                self._has_ended = True
                return text[:place]
        # A backslash at the very end escapes the next text's first character.
        self._is_escaped = self._is_in_string and text.endswith("\\", place)
        return text


def _tell(said: Said, arguments: _Arguments, text: str) -> None:
    more = arguments.take(text)
    if arguments.index is not None and more:
        said.add(CallDelta(arguments.index, None, more))


def _begins(mark: str, text: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``mark``."""
    longest = min(len(mark) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if mark.startswith(text[-length:])), 0)


def _text(literal: str) -> str | None:
    """Return the text of a JSON string, None for what is none."""
    try:
        return str(orjson.loads(literal))
    except orjson.JSONDecodeError:
        return None


def _call(text: str) -> ToolCall | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    name = found.get("name") if isinstance(found, dict) else None
    arguments = found.get("arguments", {}) if isinstance(found, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(name, orjson.dumps(arguments).decode())
    except orjson.JSONEncodeError:
        # orjson reads deeper nesting than it writes.
        return None
