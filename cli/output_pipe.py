"""A pipe for what a supervised process prints."""

import asyncio
import os
from collections.abc import AsyncIterator

from cli.child_pipe import ChildPipe

_LINE_BYTES = 2**20


class OutputPipe(ChildPipe):
    """A pipe for the output of one child, whose own processes write to it, too.

    Reading can end while one of these lives on, which the pipe of a ``Process`` does not allow.
    """

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines up to the end of the last process that writes, and close the pipe. Call it once.

        Longer lines than the reader keeps come in parts, or nobody would read on and the child wait.
        """
        output, file = asyncio.StreamReader(_LINE_BYTES), os.fdopen(self._reading, "rb", 0)
        # Closed by the event loop from now on.
        self._reading = -1
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), file)
        try:
            while True:
                try:
                    yield await output.readuntil(b"\n")
                except asyncio.LimitOverrunError as overrun:
                    yield await output.readexactly(overrun.consumed)
                except asyncio.IncompleteReadError as ended:
                    if ended.partial:
                        yield ended.partial
                    return
        finally:
            transport.close()
