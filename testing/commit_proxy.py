"""A proxy to PostgreSQL that loses the answer of one COMMIT: the client sees a broken connection, the server commits."""

import asyncio
import threading

from testing.tcp_proxy import Ends, TcpProxy

_PATIENCE = 9.0
"""Seconds for which a held COMMIT waits at most: PostgreSQL ends a transaction that stands idle for longer."""


class CommitProxy(TcpProxy):
    """Loses the answer of the next COMMIT of a transaction that names ``marker``."""

    def __init__(self, host: str, port: int, marker: str, *, holds: bool = False) -> None:
        """Every transaction names an empty marker.

        With ``holds`` the server gets the COMMIT only with ``let_commit``, when its client has lost the connection already.
        """
        super().__init__(host, port)
        self._marker = marker.encode()
        self._holds = holds
        self._let = asyncio.Event()
        self._is_committed = threading.Event()
        self.lost = threading.Event()
        """Set when the client has lost the connection."""

    def disarm(self) -> None:
        """Lose no COMMIT until ``arm``."""
        self.lost.set()

    def arm(self) -> None:
        """Lose the answer of the next COMMIT."""
        self._is_committed.clear()
        self.lost.clear()

    def let_commit(self) -> None:
        """Let the held COMMIT reach the server, and wait until it has committed."""
        self._loop.call_soon_threadsafe(self._let.set)
        if not self._is_committed.wait(60):
            raise TimeoutError("the server did not commit")

    async def _pass_on(self, here: Ends, there: Ends) -> None:
        await asyncio.gather(self._up(here, there), self._down(here, there))

    async def _up(self, here: Ends, there: Ends) -> None:
        said = b""
        try:
            while data := await here[0].read(2**16):
                said = data if b"BEGIN" in data else said + data
                if b"COMMIT" in data and self._marker in said and not self.lost.is_set():
                    self.lost.set()
                    here[1].transport.abort()
                    if self._holds:
                        await asyncio.wait_for(self._let.wait(), _PATIENCE)
                    there[1].write(data)
                    await self._is_told(there)
                    return
                there[1].write(data)
                await there[1].drain()
        finally:
            there[1].transport.abort()

    async def _is_told(self, there: Ends) -> None:
        """Wait until the server has answered the COMMIT."""
        await there[1].drain()
        await asyncio.wait_for(asyncio.to_thread(self._is_committed.wait), 10)

    async def _down(self, here: Ends, there: Ends) -> None:
        try:
            while data := await there[0].read(2**16):
                if here[1].transport.is_closing():
                    if b"COMMIT" in data:
                        self._is_committed.set()
                    continue
                here[1].write(data)
                await here[1].drain()
        finally:
            here[1].transport.abort()
