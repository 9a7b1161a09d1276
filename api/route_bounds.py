"""Bounds of each route: the size of its body, whether its answer is held back on purpose, what may refuse it.

A route without a declaration takes a small body, answers at once, and counts to the rates of requests. A read-only tenant is
refused it, unless it reads or deletes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from starlette.types import Scope

KIB, MIB = 2**10, 2**20

SMALL_BODY = 64 * KIB
"""Bytes of a body that holds ids and a few settings."""
METADATA_BODY = MIB
"""Bytes of a body that may hold a tenant's own metadata."""
TEXT_BODY = 4 * MIB
"""Bytes of a conversation. JSON of this size is parsed within tens of milliseconds."""
PROMPT_BODY = 6 * MIB
"""Bytes of a prompt as token ids: over half a million of them."""
JSON_DATA_BODY = 12 * MIB
"""Bytes of a training request as JSON: what SDKs before 0.25 send at most."""

ANY_SIZE = 2**63 - 1
"""A body as large as ``WEFT_MAX_BODY_BYTES`` allows."""

STREAMED_BODY = 2**63 - 1
"""A body that is written to a file as it comes, as large as ``WEFT_MAX_IMPORT_BYTES`` allows."""

_ATTRIBUTE = "weft_route_bounds"

F = TypeVar("F", bound=Callable[..., Any])


class Holding(Enum):
    """Length of time for which a route's request stays in progress."""

    NO = auto()
    """The answer comes as soon as it is known."""
    POLL = auto()
    """The request is held for at most ``WEFT_POLL_HOLD``."""
    STREAM = auto()
    """The request lasts as long as the sample or the download that it follows, or the upload that it is."""


@dataclass(frozen=True, slots=True)
class RouteBounds:
    """Largest body in bytes, also after expansion, and how long a request stays.

    - ``is_counted``: False where a client counts on an answer. Such a request counts to no rate (``api.request_rates``).
    - ``goes_on``: True for a change that a read-only tenant may make, since it ends, frees or takes back something; for a read
      by ``POST``; and where the endpoint itself refuses new work. So is every route on whose answer clients count.
    """

    body_bytes: int = SMALL_BODY
    holding: Holding = Holding.NO
    is_counted: bool = True
    goes_on: bool = False


DEFAULT_BOUNDS = RouteBounds()


def bounded(
    *, body: int = SMALL_BODY, holding: Holding = Holding.NO, is_counted: bool = True, goes_on: bool = False
) -> Callable[[F], F]:
    """Return a decorator that declares an endpoint's bounds. It stands below the route's decorator."""

    def declare(endpoint: F) -> F:
        setattr(endpoint, _ATTRIBUTE, RouteBounds(body, holding, is_counted, goes_on or not is_counted))
        return endpoint

    return declare


def declared_bounds(endpoint: Callable[..., Any] | None) -> RouteBounds:
    """Return the bounds of an endpoint."""
    bounds: RouteBounds = getattr(endpoint, _ATTRIBUTE, DEFAULT_BOUNDS)
    return bounds


def bounds_of(scope: Scope) -> RouteBounds:
    """Return the bounds of the route that a request has matched."""
    return declared_bounds(scope.get("endpoint"))
