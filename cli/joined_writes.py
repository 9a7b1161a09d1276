"""A transport that sends the head of an answer in one write with the beginning of its body.

uvicorn writes them one after the other, and uvloop hands each write to the system at once: two packets an answer, the first of
which wakes a client that can only wait for the second.
"""

import asyncio
from typing import Any

_HEAD = b"HTTP/1."
"""Beginning of every head. A piece of a body that begins so is joined with the next one: the client gets the same bytes."""


class JoinedWrites:
    """A connection's transport. What it does not have itself is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        """Return what the transport has under that name."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send ``data``. A head is sent with what is written next, and at the latest in the loop's next turn."""
        if data.startswith(_HEAD):
            self._head += data
            self._loop.call_soon(self._send_head)
        elif self._head:
            held, self._head = self._head, b""
            # Not one bytes object: a body may be large.
            self._transport.writelines((held, data))
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection once all that was written is sent."""
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        """Send a head whose body has not begun, such as a stream's."""
        held, self._head = self._head, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)
