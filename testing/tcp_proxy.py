"""A TCP proxy that takes a server away: connections break or fall silent, and new ones are refused or stall."""

import asyncio
import socket
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Self

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TcpProxy:
    """A proxy on a free loopback port, in a thread of its own. Use as a context manager."""

    def __init__(self, host: str, port: int) -> None:
        """``host`` and ``port`` are those of the server."""
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open: set[asyncio.StreamWriter] = set()
        self._is_away = False
        self._stalls = False
        self._is_lost = asyncio.Event()
        # Bound from now on: nobody else gets the port before the proxy listens.
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def cut(self) -> None:
        """Break every connection; new ones are closed at once."""
        self._call(self._cut())

    def stall(self) -> None:
        """Break every connection; new ones are accepted and get no answer."""
        self._stalls = True
        self._call(self._cut())

    def lose(self) -> None:
        """Carry nothing more on open connections and leave them open, as a host that vanishes does; new ones are served."""
        self._call(self._lose())

    def restore(self) -> None:
        """Pass connections through again."""
        self._is_away = self._stalls = False
        self._call(self._close_all())

    async def _cut(self) -> None:
        self._is_away = True
        await self._close_all()

    async def _lose(self) -> None:
        self._is_lost.set()
        self._is_lost = asyncio.Event()

    async def _close_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self._is_away:
                if self._stalls:
                    await reader.read()
                return
            there_reader, there_writer = await asyncio.open_connection(*self._target)
            self._open.add(there_writer)
            try:
                await self._pass_on((reader, writer), (there_reader, there_writer))
            finally:
                self._open.discard(there_writer)
                there_writer.close()
        except OSError:
            return
        finally:
            self._open.discard(writer)
            writer.close()

    async def _pass_on(self, here: Ends, there: Ends) -> None:
        """Pass bytes on, both ways, until one end closes."""
        is_lost = self._is_lost
        await asyncio.gather(_pump(here[0], there[1], is_lost), _pump(there[0], here[1], is_lost))

    def _call(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._socket)

    async def _end(self) -> None:
        self._server.close()
        await self._close_all()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_lost: asyncio.Event) -> None:
    try:
        while data := await reader.read(2**16):
            if is_lost.is_set():
                continue
            writer.write(data)
            await writer.drain()
    finally:
        writer.transport.abort()
