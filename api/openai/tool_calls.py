"""Tool calls in the text of an answer: ``<tool_call>`` JSON ``</tool_call>``, as Hermes and Qwen models write them."""

from dataclasses import dataclass, field

import orjson

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(slots=True)
class Said:
    """New text of an answer, and its new calls. ``first_call`` is the number of the first of them in the answer."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    first_call: int = 0


class ToolCallReader:
    """Splits the growing text of one answer into plain text and calls.

    Space around calls is dropped. A call that is broken off, or is no JSON of a call, is plain text.
    """

    def __init__(self, most_calls: int) -> None:
        """Read ``most_calls`` calls and drop any further; 0 takes all text as it is."""
        self._most_calls = most_calls
        self._held = ""
        self._searched = 0
        """Index in what is held before which no call ends."""
        self._is_after_call = False
        self.calls = 0
        """Number of calls so far, without dropped ones."""

    def push(self, text: str) -> Said:
        """Return what is certain after ``text``; the beginning of a possible call is held back."""
        if not self._most_calls:
            return Said(text)
        self._held += text
        said = Said(first_call=self.calls)
        while (begin := self._held.find(BEGIN)) >= 0:
            end = self._held.find(END, max(begin, self._searched))
            if end < 0:
                self._say(said, len(self._held[:begin].rstrip()))
                self._searched = max(0, len(self._held) - len(END) + 1)
                return said
            self._take(said, begin, end)
        self._say(said, len(self._held) - self._unsettled())
        return said

    def end(self) -> Said:
        """Return the rest; no text follows."""
        said = Said(first_call=self.calls)
        self._say(said, len(self._held))
        return said

    def _take(self, said: Said, begin: int, end: int) -> None:
        """Take what stands between the marks at ``begin`` and ``end``, and the text before it, out of what is held."""
        call = _call(self._held[begin + len(BEGIN) : end])
        after = end + len(END)
        self._searched = 0
        if call is None:
            self._say(said, after)
            return
        before = len(self._held[:begin].rstrip())
        self._say(said, before)
        self._held = self._held[after - before :]
        self._is_after_call = True
        if self.calls < self._most_calls:
            self.calls += 1
            said.calls.append(call)

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
        settled = len(self._held)
        for length in range(min(len(BEGIN) - 1, settled), 0, -1):
            if BEGIN.startswith(self._held[-length:]):
                settled -= length
                break
        return len(self._held) - len(self._held[:settled].rstrip())


def _call(text: str) -> ToolCall | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    name = found.get("name") if isinstance(found, dict) else None
    arguments = found.get("arguments", {}) if isinstance(found, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, orjson.dumps(arguments).decode())
