"""Both ends of a process of weft's own that another one asks: frames on its standard input and output.

A frame is its length, then as many bytes. The process ends when its input does, in the middle of its work too: so it outlives
the process that started it by no more than a moment, however that ends.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO, Self

LENGTH_BYTES = 8
_LARGEST_FRAME = 2**31
_END_SECONDS = 10.0
"""Time to end in order, and once more time to end when killed: a disk that does not answer may hold the process for ever."""


class ChildProcess:
    """The asking end. Usable on one event loop."""

    def __init__(self, process: Process) -> None:
        """Take over ``process``; use ``start``."""
        self._process = process

    @classmethod
    async def start(cls, module: str) -> Self:
        """Start ``python -m MODULE``, whose other end is ``Requests``. Raises ``OSError``."""
        return cls(await asyncio.create_subprocess_exec(sys.executable, "-m", module, stdin=PIPE, stdout=PIPE))

    @property
    def pid(self) -> int | None:
        """Process id; None once the process has ended."""
        return self._process.pid if self._process.returncode is None else None

    async def send(self, body: bytes) -> None:
        """Send a frame. Raises ``OSError`` or ``EOFError`` when the process has ended."""
        if self._process.stdin is None:
            raise EOFError
        self._process.stdin.write(_framed(body))
        await self._process.stdin.drain()

    async def receive(self) -> bytes:
        """Return the next frame. Raises ``OSError`` or ``EOFError`` when the process has ended."""
        if self._process.stdout is None:
            raise EOFError
        length = int.from_bytes(await self._process.stdout.readexactly(LENGTH_BYTES), "big")
        if length > _LARGEST_FRAME:
            raise EOFError
        return await self._process.stdout.readexactly(length)

    async def end(self, *, at_once: bool = False) -> None:
        """End the process: at the end of its input, or killed when it does not end or should end ``at_once``."""
        if self._process.returncode is not None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(0 if at_once else _END_SECONDS):
                await self._process.wait()
        except (TimeoutError, asyncio.CancelledError):
            with suppress(ProcessLookupError):
                self._process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self._process.wait()


class Requests:
    """The answering end: requests of the process that started this one. Make one, in the main thread, before the work."""

    def __init__(self) -> None:
        """Read on from now on, in a thread. Whatever a library prints goes to standard error, not between the answers."""
        # A terminal's Ctrl-C goes to both processes. The other one tells this one to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._read: SimpleQueue[bytes] = SimpleQueue()
        requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        Thread(target=self._read_on, args=(requests,), daemon=True).start()

    def next(self) -> bytes:
        """Wait for the next request."""
        return self._read.get()

    def answer(self, body: bytes) -> None:
        """Send a frame."""
        self._answers.write(_framed(body))
        self._answers.flush()

    def _read_on(self, requests: BinaryIO) -> None:
        while len(length := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
            self._read.put(requests.read(int.from_bytes(length, "big")))
        os._exit(0)


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
