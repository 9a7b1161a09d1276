"""A pipe for what a supervised process prints."""

import asyncio
import os
from collections.abc import AsyncIterator

_LINE_BYTES = 2**20


class OutputPipe:
    """A pipe for the output of one child, whose own processes write to it, too.

    Reading can end while one of these lives on, which the pipe of a ``Process`` does not allow.
    """

    def __init__(self) -> None:
        """Raise ``OSError`` when no more files can be open."""
        self._reading, self.writing = os.pipe()

    def started(self) -> None:
        """Close the child's end here, which the child has by now."""
        if self.writing >= 0:
            os.close(self.writing)
        self.writing = -1

    def close(self) -> None:
        """Close the pipe, whose lines nobody reads any more."""
        self.started()
        if self._reading >= 0:
            os.close(self._reading)

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
