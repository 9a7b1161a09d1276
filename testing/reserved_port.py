"""A loopback port that nobody else is given before its server listens, nor while the server is started again."""

import socket


class ReservedPort:
    """A port whose socket is bound and never listens: only who asks for this very port, and may share it, gets it."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port up."""
        self._socket.close()
