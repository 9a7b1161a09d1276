"""HTTP connections with time limits, and an end to their number: uvicorn has neither by itself."""

import asyncio
import logging
import resource
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

    - Headers have a deadline from the first byte, or from the connection's beginning.
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
        """Read on; a client that begins a new request has to bring its headers in time."""
        super().data_received(data)
        has_begun = self.is_idle and self._reading is None and self.timeout_keep_alive_task is None
        if has_begun and not self.transport.is_closing():
            self._begin_reading()

    def on_headers_complete(self) -> None:
        """End the deadline of the headers."""
        self._end_reading()
        self.scope.setdefault("extensions", {})[HOLDER] = {"tell": self.belongs_to}
        super().on_headers_complete()
        self.belongs_to(self.holder)

    def on_message_complete(self) -> None:
        """Keep the connection whose body has come to its end after the answer."""
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
