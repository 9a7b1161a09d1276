"""Answers as they came over HTTP, beside the records that the client reads from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

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
    """Answers to the calls of ``method`` within the block. Raises ``TypeError`` for a method that yields.

    Its answers come while its caller reads on, each page with one of its own.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._name = getattr(method, "__qualname__", repr(method))
        self._noted: list[httpx.Response] = []
        own = inspect.unwrap(method)
        if inspect.isgeneratorfunction(own) or inspect.isasyncgenfunction(own):
            raise TypeError(
                f"{self._name} yields over several answers: with_raw_response takes methods that return a record"
            )

    @property
    def last(self) -> httpx.Response:
        """Return the last answer. Raises ``TypeError`` where none came."""
        if not self._noted:
            raise TypeError(f"{self._name} has sent no request: with_raw_response takes methods of the client")
        return self._noted[-1]

    def __enter__(self) -> Self:
        self._token = _responses.set(self._noted)
        return self

    def __exit__(self, *_: object) -> None:
        _responses.reset(self._token)


def note_response(response: httpx.Response) -> None:
    """Keep an answer for the block that asks for it."""
    noted = _responses.get()
    if noted is not None:
        noted.append(response)
