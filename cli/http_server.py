"""The HTTP server of the API: binds the address early, and answers held polls before it ends."""

import asyncio
import signal
import socket

from api.app import create_app
from api.route_building import build_routes
from api.services import ApiServices
from cli.address import bind_address
from cli.http_protocol import protocol
from cli.signal_free_server import SignalFreeServer, server_config
from ledger.wakeups import Wakeups
from store.settings import Settings


def bind(settings: Settings, *, shared: bool = False) -> socket.socket:
    """Bind a socket to the settings' address; with ``shared``, others may bind it as well. Raises ``CannotListen``."""
    return bind_address(settings.host, settings.port, shared=shared, setting="--port")


class ApiServer(SignalFreeServer):
    """A server that answers held polls when the process is asked to end; the SDK polls again after the restart."""

    def __init__(self, services: ApiServices, settings: Settings, wakeups: Wakeups) -> None:
        app = create_app(services)
        build_routes(app.router, app.state.dashboard.router)
        super().__init__(server_config(app, settings, protocol(settings)))
        self._wakeups = wakeups

    def end_on_signals(self) -> None:
        """Have SIGINT and SIGTERM shut the server down cleanly. Call it on the event loop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._ask_to_end)

    def _ask_to_end(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._wakeups.close()
        await super().shutdown(sockets)
