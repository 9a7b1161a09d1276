"""Clients of HTTP servers on Unix sockets."""

import socket

import httpx


def unix_client(path: str) -> httpx.Client:
    """A client of the server at ``path``. Raises ``httpx.ConnectError`` when nobody listens there.

    Asked first by a socket of our own: httpcore leaves one open that it could not connect, and a killed server leaves its file.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        try:
            asked.connect(path)
        except OSError as error:
            raise httpx.ConnectError(f"nobody listens at {path}: {error}") from error
    return httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://localhost", timeout=40)
