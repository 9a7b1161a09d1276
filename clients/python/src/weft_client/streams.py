"""Streams of samples: server-sent events as records, without a token twice when a stream is asked for again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from weft_client.errors import WeftClientError
from weft_client.models import Record


class Accepted(Record):
    """The sample is recorded under ``request_id``."""

    request_id: str


class Tokens(Record):
    """New tokens of a sequence, the first at position ``start``, all made by ``version``; None is the bare base.

    A ``start`` before the end of what came already means that the sample was drawn again: these tokens replace the earlier
    ones from there on.
    """

    sequence: int
    start: int
    version: str | None = None
    tokens: list[int]
    logprobs: list[float]


class DoneSequence(Record):
    """A whole sequence."""

    stop_reason: str
    tokens: list[int]
    logprobs: list[float]


class Done(Record):
    """The sample's end, with every sequence whole."""

    request_id: str
    sequences: list[DoneSequence]


Event = Accepted | Tokens | Done
_KINDS: Mapping[str, type[Event]] = {"accepted": Accepted, "tokens": Tokens, "done": Done}
_STATUS = 200
"""HTTP status of a stream that has begun."""


_Drawn = tuple[int, str | None]
"""A token, and the version that drew it."""


@dataclass
class StreamReader:
    """Reader of a stream's lines. The same reader goes on with a stream that is begun again."""

    is_done: bool = False
    _name: str = ""
    _is_accepted: bool = False
    _drawn: dict[int, list[_Drawn | None]] = field(default_factory=dict)
    """Tokens of each sequence that were handed on and not replaced; None where none came."""

    def events(self, line: str) -> Iterator[Event]:
        """Yield the event that the line ends, without tokens that came already. Raises ``WeftClientError``."""
        if line.startswith("event: "):
            self._name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
            try:
                if self._name == "error":
                    raise _failure(data)
                found = _KINDS[self._name].model_validate_json(data) if self._name in _KINDS else None
            except ValidationError as error:
                told = f"an event {self._name!r} of the stream is none of weft's"
                raise WeftClientError(told, code="bad_answer", status=_STATUS) from error
            if found is not None:
                yield from self._fresh(found)
        elif not line:
            self._name = ""

    def _fresh(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Accepted):
            if not self._is_accepted:
                self._is_accepted = True
                yield event
            return
        if isinstance(event, Done):
            self.is_done = True
            yield event
            return
        skipped = self._take(event)
        if skipped < len(event.tokens):
            yield event.model_copy(
                update={
                    "start": event.start + skipped,
                    "tokens": event.tokens[skipped:],
                    "logprobs": event.logprobs[skipped:],
                }
            )

    def _take(self, part: Tokens) -> int:
        """Note the part's tokens; return how many at its beginning came already."""
        drawn = self._drawn.setdefault(part.sequence, [])
        drawn += [None] * (part.start - len(drawn))
        new = [(token, part.version) for token in part.tokens]
        overlap = min(len(drawn) - part.start, len(new))
        if drawn[part.start : part.start + overlap] == new[:overlap]:
            drawn += new[overlap:]
            return overlap
        # Drawn again: nothing behind its beginning counts any more.
        drawn[part.start :] = new
        return 0


def is_sign_of_life(line: str) -> bool:
    """Return whether the line is an event's or a comment's of a stream, as the service sends some at least every few seconds."""
    return line.startswith((":", "event: "))


def _failure(data: str) -> WeftClientError:
    told = TypeAdapter(dict[str, Any]).validate_json(data)
    return WeftClientError(
        str(told.get("error") or "the sample failed"),
        code=str(told.get("code") or "failed"),
        status=_STATUS,
        retryable=bool(told.get("retryable", False)),
    )
