"""HTTP connections with time limits, bounded heads, and an end to their number: uvicorn has none of these by itself."""

import asyncio
import logging
import resource
import sys
from asyncio.events import TimerHandle
from typing import Any, ClassVar, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from api.connection_holder import HOLDER, network_of
from cli.connections import Connections
from cli.joined_writes import JoinedWrites
from store.http_settings import HttpSettings

log = logging.getLogger(__name__)

_FILES_FOR_THE_REST = 256
"""Open files that a process needs beside its connections: database, Redis, checkpoints."""
MOST_BESIDE_BODY = 64 * 1024
"""Bytes of a request that are not its body (its head, the framing of chunks, trailers), beside one for each byte of body."""
MOST_HEADERS = 128
"""Most headers of a request, trailers included."""
_MOST_PIPELINED = 16
"""Most requests of a connection that wait for the answer to an earlier one."""
_MOST_AFTER_REFUSAL = 2**20
"""Most bytes that come after a refusal. Closed at once, the connection would be reset before the client has read it."""
_TOO_LARGE = (
    f"the head of a request may have {MOST_BESIDE_BODY} bytes and {MOST_HEADERS} headers; send fewer or shorter ones\n"
)


class HeadTooLarge(Exception):
    """A request has more beside its body than it may have."""


def open_file_limit() -> int:
    """Let this process open as many files as the system allows, and return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 2**20


def protocol(settings: HttpSettings) -> type[HttpToolsProtocol]:
    """Return the protocol class for uvicorn, with the limits of ``settings``."""
    most = min(settings.max_connections, max(16, open_file_limit() - _FILES_FOR_THE_REST))

    class Limited(LimitedProtocol):
        limits = settings
        held = Connections(most)

    return Limited


class LimitedProtocol(HttpToolsProtocol):
    """A connection that ends when its client is too slow to send headers, or to read.

    - Headers have a deadline from the first byte, or from the connection's beginning, and a bounded size: the parser joins
      each piece of a line to those before it. So have chunks' framing and trailers.
    - The rest of a body that was answered early has the same deadline; a body that is read has the API's own (``read_body``).
    - An answer that the client does not read has a deadline for each piece.
    - A connection beyond the most takes the place of another one, of who has the most (``Connections``).
    """

    limits: ClassVar[HttpSettings]
    held: ClassVar["Connections[LimitedProtocol]"]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._reading: TimerHandle | None = None
        self._writing: TimerHandle | None = None
        self._body = self._body_now = self._beside_body = 0
        """Bytes of the request's body, those of them in the data that is parsed now, and the bytes that are none of it."""
        self._has_ended = False
        """Data that is parsed now has the end of a request."""
        self._after_refusal: int | None = None
        """Bytes that have come since a refusal; None before one."""
        self.holder = ""

    @property
    def is_idle(self) -> bool:
        """True while no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the deadline of the first headers."""
        super().connection_made(cast(asyncio.Transport, JoinedWrites(transport, self.loop)))
        self.belongs_to(f"address {network_of({'client': self.client})}")
        if self.held.is_overfull:
            surplus = self.held.surplus(self)
            if not surplus.is_idle or surplus is self:
                log.warning("more than %d connections, all in use; one of %s is closed", self.held.most, surplus.holder)
            surplus.transport.abort()
        if not transport.is_closing():
            self._begin_reading()

    def belongs_to(self, holder: str) -> None:
        """Count the connection as one of ``holder``, an address or a tenant."""
        self.holder = holder
        if not self.transport.is_closing():
            self.held.put(self, holder, is_idle=self.is_idle)

    def data_received(self, data: bytes) -> None:
        """Read on; a client that begins a new request has to bring its headers in time, and in bounds."""
        if self._after_refusal is not None:
            self._after_refusal += len(data)
            if self._after_refusal > _MOST_AFTER_REFUSAL:
                self._give_up()
            return
        self._body_now, self._has_ended = 0, False
        super().data_received(data)
        self._beside_body = 0 if self._has_ended else self._beside_body + len(data) - self._body_now
        if self._beside_body > MOST_BESIDE_BODY + self._body:
            self._refuse_size()
        has_begun = self.is_idle and self._reading is None and self.timeout_keep_alive_task is None
        if has_begun and not self.transport.is_closing():
            self._begin_reading()

    def on_message_begin(self) -> None:
        """Count the bytes of a new request. Raises ``HeadTooLarge`` behind too many that have no answer yet."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise HeadTooLarge
        self._body = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, or a trailer. Raises ``HeadTooLarge`` for one too many."""
        if len(self.headers) >= MOST_HEADERS:
            raise HeadTooLarge
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Count the body's bytes."""
        self._body += len(body)
        self._body_now += len(body)
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed, or has too much; beside an answer under way nothing can be said."""
        error = sys.exc_info()[1]
        # The parser raises an error of its own for whatever a callback raises.
        if error is not None and isinstance(error.__context__, HeadTooLarge):
            self._refuse_size()
        elif self.is_idle:
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _refuse_size(self) -> None:
        if self.transport.is_closing() or self._after_refusal is not None:
            return
        if not self.is_idle or self._body:
            self.transport.abort()
            return
        self._after_refusal = 0
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(_TOO_LARGE)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write((head + _TOO_LARGE).encode("ascii"))
        self._begin_reading()

    def on_headers_complete(self) -> None:
        """End the deadline of the headers. Raises ``HeadTooLarge`` for a head that came at once."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_BESIDE_BODY:
            raise HeadTooLarge
        self._end_reading()
        self.scope.setdefault("extensions", {})[HOLDER] = {"tell": self.belongs_to}
        super().on_headers_complete()
        self.belongs_to(self.holder)

    def on_message_complete(self) -> None:
        """Keep the connection whose body has come to its end after the answer."""
        self._has_ended = True
        was_answered = self.cycle is not None and self.cycle.response_complete
        super().on_message_complete()
        if self.cycle is not None:
            self.cycle.more_body = False
        if was_answered:
            self._end_reading()
            self._keep_alive()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for a while for the rest of this one's body."""
        cut = self.cycle is not None and self.cycle.more_body
        super().on_response_complete()
        self.belongs_to(self.holder)
        if cut and self.is_idle and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            # Closed at once, the connection would be reset before the client has read the answer.
            self._begin_reading()

    def pause_writing(self) -> None:
        """Begin the deadline for a client that does not read."""
        super().pause_writing()
        self._end_writing()
        self._writing = self.loop.call_later(self.limits.send_timeout.total_seconds(), self._give_up)

    def resume_writing(self) -> None:
        """End that deadline."""
        self._end_writing()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End every deadline, and hold no place."""
        self.held.remove(self)
        self._end_reading()
        self._end_writing()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _keep_alive(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _begin_reading(self) -> None:
        self._end_reading()
        self._reading = self.loop.call_later(self.limits.header_timeout.total_seconds(), self._give_up)

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _end_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _give_up(self) -> None:
        self.transport.abort()
