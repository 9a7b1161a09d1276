"""HTTP client of one vLLM server: one session with bounded connections, and weft's errors for every failure."""

import logging
from asyncio import timeout
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.sampling.vllm.messages import ErrorAnswer

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CONNECT_S = 5.0
# Well below the server's own five seconds: a request on a connection that the server is closing would fail.
_KEEP_ALIVE_S = 1.0
# In addition to the streams: a cut must not wait for a stream to end.
_CONTROL_CONNECTIONS = 16
_REFUSALS = frozenset({400, 404, 413, 422})
UNIX = "unix://"
"""Scheme of a server that listens on a Unix socket: ``unix:///folder/socket``."""


def open_session(base_url: str, connections: int, keep_alive_s: float, **options: Any) -> aiohttp.ClientSession:
    """Return a session of at most ``connections`` connections (0: any number) to the server at ``base_url``."""
    limits: dict[str, Any] = {"limit": connections, "keepalive_timeout": keep_alive_s}
    if base_url.startswith(UNIX):
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(base_url.removeprefix(UNIX), **limits)
    else:
        connector = aiohttp.TCPConnector(**limits)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), **options)


def request_url(base_url: str) -> str:
    """Return the start of the URLs of requests to ``base_url``, without a slash at its end."""
    return "http://localhost" if base_url.startswith(UNIX) else base_url.rstrip("/")


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete response."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """True if the server did as asked."""
        return self.status == 200

    @property
    def message(self) -> str:
        """vLLM's own error message. Not to be shown to tenants: it may hold paths."""
        try:
            return msgspec.json.decode(self.body, type=ErrorAnswer).error.message
        except msgspec.MsgspecError:
            return self.body[:500].decode(errors="replace")


class VllmHttp:
    """Client of one server. Raises ``EngineFailure`` for a server that cannot be reached, breaks off or takes too long."""

    def __init__(self, name: str, base_url: str, api_key: str | None, max_streams: int) -> None:
        self._name = name
        self._address = base_url
        self._base_url = request_url(base_url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections = max_streams + _CONTROL_CONNECTIONS
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the session on this event loop."""
        self._session = open_session(
            self._address,
            self._connections,
            _KEEP_ALIVE_S,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )

    async def close(self) -> None:
        """Close every connection. Safe to repeat."""
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, deadline_s: float) -> Answer:
        """GET ``path`` within ``deadline_s`` seconds."""
        return await self._ask("GET", path, None, deadline_s)

    async def post(self, path: str, body: Mapping[str, Any] | None, deadline_s: float | None) -> Answer:
        """POST ``body`` as JSON within ``deadline_s`` seconds; None sets no limit."""
        return await self._ask("POST", path, body, deadline_s)

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST ``body`` and yield the response while it arrives. Leaving the context early closes the connection."""
        with self._failures():
            async with self._request("POST", path, body) as response:
                yield response

    def decode(self, body: bytes, kind: type[T]) -> T:
        """Return ``body`` decoded as ``kind``. Raises ``EngineFailure`` when it is something else."""
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineFailure(f"replica {self._name} answered what weft does not understand") from error

    def refusal(self, answer: Answer) -> WeftError:
        """Return the error for an answer that is not ``ok``.

        ``InvalidRequest`` if the caller must change the request, ``EngineFailure`` if the operator must look at the server.
        """
        _log.warning("replica %s answered %d: %s", self._name, answer.status, answer.message)
        if answer.status in _REFUSALS:
            return InvalidRequest(
                f"the sampler refused the request as one it cannot serve (status {answer.status}); "
                "check the prompt's tokens, the sampling parameters, and the schemas of response_format and tools"
            )
        return EngineFailure(f"replica {self._name} failed (status {answer.status})")

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float | None) -> Answer:
        with self._failures():
            async with timeout(deadline_s), self._request(method, path, body) as response:
                return Answer(response.status, await response.read())

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None or self._session.closed:
            raise EngineFailure(f"replica {self._name} is closed")
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        async with self._session.request(
            method, self._base_url + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            yield response

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise EngineFailure(f"replica {self._name} did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailure(f"replica {self._name} cannot be reached ({type(error).__name__})") from error
