"""Addresses that a process listens on."""

import socket

from contracts.errors import InvalidRequest


class CannotListen(InvalidRequest):
    """Raised when the address is taken or does not belong to this machine."""

    code = "cannot_listen"


def bind_address(host: str, port: int, *, shared: bool, setting: str) -> socket.socket:
    """Bind a socket; with ``shared``, others may bind it as well. Raises ``CannotListen``, which names ``setting``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CannotListen(
            f"cannot listen on {host}:{port} ({error.strerror}); stop what listens there or pass another {setting}"
        ) from error
    return listener


def address(listener: socket.socket) -> str:
    """Return the URL of the bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
