"""Requests that methods of the clients would send."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from inspect import isfunction
from typing import Any, TypeVar, cast

import httpx
import pytest
from weft_client.admin_async import AsyncWeftAdmin
from weft_client.asynchronous import AsyncWeft
from weft_client.call import Call
from weft_client.transport_async import AsyncTransport

Method = Callable[[str], Awaitable[Call[Any]]]
"""Function that returns the request of a method by its name."""
C = TypeVar("C", AsyncWeft, AsyncWeftAdmin)


class Noted(Exception):
    """Ends a method once its request is noted."""


class EmptyPage:
    """A page of any list, without rows, behind which there is another."""

    def __getattr__(self, name: str) -> object:
        return "next" if name.startswith("next") else []


class NotingTransport:
    """Notes the request that a method would send after ``pages`` empty ones."""

    def __init__(self, pages: int) -> None:
        self.noted: Call[Any] | None = None
        self._pages = pages

    async def send(self, call: Call[Any]) -> Any:
        self._pages -= 1
        if self._pages >= 0:
            return EmptyPage()
        self.noted = call
        raise Noted

    send_only = send_versioned = send

    async def every(self, first: Call[Any]) -> AsyncIterator[Any]:
        await self.send(first)
        yield

    lines = every

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        await self.send(Call("POST", path, None, body=body))
        yield


def unconnected(kind: type[C]) -> C:
    """Return a client that has no way to a service; one with a way takes a tenth of a second."""
    http = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(500)))
    return kind("http://nowhere", "tml-x", http=http)


def resources(client: C) -> dict[str, Any]:
    """Return the client's groups of methods by their names."""
    return {name: found for name, found in vars(client).items() if hasattr(found, "_transport")}


def methods_of(group: Any) -> set[str]:
    """Return the names of a group's methods that users call."""
    return {name for name, found in vars(type(group)).items() if isfunction(found) and not name.startswith("_")}


async def call_of(kind: type[C], begin: Callable[[C], Any], *, pages: int = 0) -> Call[Any]:
    """Return the request that ``begin`` has a client send, of a list that behind so many pages."""
    client, transport = unconnected(kind), NotingTransport(pages)
    for resource in resources(client).values():
        resource._transport = cast(AsyncTransport, transport)
    client._transport = cast(AsyncTransport, transport)
    begun = begin(client)
    with pytest.raises(Noted):
        await cast(Awaitable[Any], begun.__anext__() if hasattr(begun, "__anext__") else begun)
    assert transport.noted is not None
    return transport.noted
