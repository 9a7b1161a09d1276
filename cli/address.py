"""Addresses that a process listens on."""

import socket
from collections.abc import Sequence

from contracts.errors import InvalidRequest


class CannotListen(InvalidRequest):
    """Raised when the address is taken or does not belong to this machine."""

    code = "cannot_listen"


def bind_address(host: str, port: int, *, shared: bool, setting: str) -> socket.socket:
    """Bind a socket; with ``shared``, others may bind it as well. Raises ``CannotListen``, which names ``setting``."""
    options = [socket.SO_REUSEADDR, socket.SO_REUSEPORT] if shared else [socket.SO_REUSEADDR]
    try:
        return _bound(host, port, options)
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {host}:{port} ({error.strerror}); stop what listens there or pass another {setting}"
        ) from error


def reserve_address(host: str, port: int, *, setting: str) -> socket.socket:
    """Bind a socket that nobody listens on, for processes that will share the address.

    Raises ``CannotListen`` when others have it already: those of another cluster would share it, too, and get each other's
    requests.
    """
    bind_address(host, port, shared=False, setting=setting).close()
    try:
        # Without ``SO_REUSEADDR`` it holds the address against another reservation though nobody listens yet.
        return _bound(host, port, [socket.SO_REUSEPORT])
    except OSError:
        # Connections of an earlier service are ending.
        return bind_address(host, port, shared=True, setting=setting)


def _bound(host: str, port: int, options: Sequence[int]) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        for option in options:
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def address(listener: socket.socket) -> str:
    """Return the URL of the bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
