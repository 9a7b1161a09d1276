"""The sender of calls without asyncio.

``clients/python/make_sync.py`` makes this file of ``weft_client.transport_async``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from weft_client.call import Call
from weft_client.errors import WeftClientError
from weft_client.modules import Later
from weft_client.raw_responses import note_response
from weft_client.transport import Endpoint, read, unreachable

if TYPE_CHECKING:
    import httpx

    from weft_client import streams
    from weft_client.admin_models import Page
    from weft_client.models import Record
    from weft_client.streams import Event
else:
    httpx = Later("httpx")
    streams = Later("weft_client.streams")

R = TypeVar("R", bound="Record")


class Transport:
    """Sends calls over one pool of connections, and repeats those that may be repeated."""

    def __init__(self, endpoint: Endpoint, http: httpx.Client | None) -> None:
        self._endpoint = endpoint
        self._http = http or httpx.Client()

    @property
    def base_url(self) -> str:
        """Address of the service, without a slash at its end."""
        return self._endpoint.base_url

    def send(self, call: Call[R]) -> R:
        """Return the record of the answer. Raises ``WeftClientError``."""
        return (self.send_versioned(call))[0]

    def send_versioned(self, call: Call[R]) -> tuple[R, str]:
        """Return the record of the answer, and the version of its state for an ``If-Match``. Raises ``WeftClientError``."""
        answer, response = self._answer(call)
        if answer is None:
            raise WeftClientError("the answer is empty", code="no_answer", status=204)
        return answer, response.headers.get("ETag", "")

    def every(self, first: Call[Page[R]]) -> Iterator[R]:
        """Yield the rows of a list, page by page. Raises ``WeftClientError``."""
        page = self.send(first)
        while True:
            for row in page.items:
                yield row
            if page.next is None:
                return
            page = self.send(replace(first, query={**first.query, "after": page.next}))

    def send_only(self, call: Call[Any]) -> None:
        """Send a call whose answer has no body. Raises ``WeftClientError``."""
        self._answer(call)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a stream; one that breaks off is begun again. Raises ``WeftClientError``."""
        call: Call[Record] = Call("POST", path, None, body=body)
        reader, attempt = streams.StreamReader(), 0
        while not reader.is_done:
            was_heard = False
            try:
                request = self._endpoint.request(call)
                with self._http.stream(**request) as response:
                    if not response.is_success:
                        response.read()
                        read(call, response)
                    for line in response.iter_lines():
                        was_heard = was_heard or streams.is_sign_of_life(line)
                        for event in reader.events(line):
                            attempt = 0
                            yield event
                if reader.is_done:
                    return
                failure: WeftClientError = unreachable(httpx.ReadError("the stream ended early"))
            except httpx.TransportError as error:
                failure = unreachable(error)
            except WeftClientError as error:
                failure, was_heard = error, False
            if was_heard:
                # The service keeps a sample for a short while only. It is there: no reason to ask it ever more rarely.
                attempt = 0
            time.sleep(self._endpoint.delay(call, failure, attempt))
            attempt += 1

    def lines(self, call: Call[Any]) -> Iterator[str]:
        """Yield the lines of a document as it comes. Raises ``WeftClientError``; one that breaks off is not begun again."""
        try:
            with self._http.stream(**self._endpoint.request(call)) as response:
                if not response.is_success:
                    response.read()
                    read(call, response)
                for line in response.iter_lines():
                    yield line
        except httpx.TransportError as error:
            raise unreachable(error) from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _answer(self, call: Call[R]) -> tuple[R | None, httpx.Response]:
        attempt = 0
        while True:
            try:
                response = self._http.request(**self._endpoint.request(call))
                note_response(response)
                return read(call, response), response
            except httpx.TransportError as error:
                failure: WeftClientError = unreachable(error)
            except WeftClientError as error:
                failure = error
            time.sleep(self._endpoint.delay(call, failure, attempt))
            attempt += 1
