"""Answers as they came over HTTP, beside the records that the client reads from them."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import httpx

R = TypeVar("R")

_responses: ContextVar[list[httpx.Response] | None] = ContextVar("weft_responses", default=None)
"""Answers to the calls of the current task or thread; None while nobody asks for them."""


@dataclass(frozen=True)
class RawResponse(Generic[R]):
    """Record that a method returned, and the answer that it was read from: the last one, where the method sent several."""

    parsed: R
    response: httpx.Response

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.response.status_code

    @property
    def headers(self) -> httpx.Headers:
        """Headers of the answer, such as ``RateLimit``."""
        return self.response.headers

    @property
    def content(self) -> bytes:
        """Body of the answer, as it came."""
        return self.response.content


class NotedResponses:
    """Answers to the calls within the block."""

    def __enter__(self) -> list[httpx.Response]:
        noted: list[httpx.Response] = []
        self._token = _responses.set(noted)
        return noted

    def __exit__(self, *_: object) -> None:
        _responses.reset(self._token)


def note_response(response: httpx.Response) -> None:
    """Keep an answer for the block that asks for it."""
    noted = _responses.get()
    if noted is not None:
        noted.append(response)
