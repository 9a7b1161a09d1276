"""Request of the client, as data."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from weft_client.models import Record

R = TypeVar("R", bound="Record")
Archive = bytes | Iterable[bytes] | AsyncIterable[bytes]


@dataclass(frozen=True)
class Call(Generic[R]):
    """One request, and the record that its answer is read as; None for an answer without a body."""

    method: str
    path: str
    answer: type[R] | None
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content: Archive | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    """Time that the service may take beyond the client's timeout."""
    is_safe_twice: bool = True
    """False if a repeat of the request, once it has taken effect, is answered as a mistake."""
    is_rest: bool = False
    """True if the content is the rest of one whose beginning the service has."""

    is_tried_once: bool = False
    """True if the caller itself looks again: a failure is told at once, without the wait that the service asks for."""

    @property
    def is_repeatable(self) -> bool:
        """True if the request can be sent again: not with a body that streams, nor with a rest, of which some may be kept."""
        return not (self.is_rest or self.is_tried_once) and (self.content is None or isinstance(self.content, bytes))
