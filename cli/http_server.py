"""The HTTP server of the API: binds the address early, and answers held polls before it ends."""

import asyncio
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from api.app import create_app
from api.services import ApiServices
from cli.http_protocol import protocol
from contracts.errors import InvalidRequest
from ledger.wakeups import Wakeups
from store.settings import Settings


class CannotListen(InvalidRequest):
    """Raised when the address is taken or does not belong to this machine."""

    code = "cannot_listen"


def bind(settings: Settings, *, shared: bool = False) -> socket.socket:
    """Bind a socket to the settings' address; with ``shared``, others may bind it as well. Raises ``CannotListen``."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise CannotListen(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); stop what listens there or pass --port"
        ) from error
    return listener


def address(listener: socket.socket) -> str:
    """Return the URL of the bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ApiServer(uvicorn.Server):
    """A uvicorn server that answers held polls when the process is asked to end; the SDK polls again after the restart."""

    def __init__(self, services: ApiServices, settings: Settings, wakeups: Wakeups) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(services),
                log_level=settings.log_level,
                access_log=False,
                log_config=None,
                # The application reads forwarded headers itself, from trusted proxies only.
                proxy_headers=False,
                http=protocol(settings),
                timeout_keep_alive=math.ceil(settings.keep_alive.total_seconds()),
                timeout_graceful_shutdown=10,
            )
        )
        self._wakeups = wakeups

    def end_on_signals(self) -> None:
        """Have SIGINT and SIGTERM shut the server down cleanly. Call it on the event loop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._ask_to_end)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to ``end_on_signals``: uvicorn would raise them again and cut the snapshots short."""
        yield

    def _ask_to_end(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._wakeups.close()
        await super().shutdown(sockets)
