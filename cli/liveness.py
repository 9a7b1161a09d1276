"""Signs of life that a supervised process gives: a byte in a pipe for each second in which its event loop turns.

A frozen process, or one whose loop hangs, keeps its part of the connections and lives on: its supervisor ends it. The database
has no part in it, so that its outage ends nobody.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from cli.child_pipe import ChildPipe

DESCRIPTOR = "SUPERVISOR_LIVENESS_FD"
"""Environment variable with the number of the pipe's end to write to. Without it nobody watches."""
BEAT_SECONDS = 1.0
_BYTES = 2**16


@asynccontextmanager
async def signs_of_life() -> AsyncIterator[None]:
    """Give signs of life for the block, where a supervisor watches."""
    told = os.environ.pop(DESCRIPTOR, None)
    if told is None:
        yield
        return
    os.set_inheritable(int(told), False)
    beating = asyncio.create_task(_beat(int(told)), name="signs of life")
    try:
        yield
    finally:
        beating.cancel()


async def _beat(descriptor: int) -> None:
    with suppress(BrokenPipeError):
        while True:
            # A full pipe: the supervisor was frozen itself.
            with suppress(BlockingIOError):
                os.write(descriptor, b".")
            await asyncio.sleep(BEAT_SECONDS)


class LivenessPipe(ChildPipe):
    """A pipe for the signs of life of one child. Looks are counted, not time: a frozen supervisor takes no child for dead."""

    def __init__(self) -> None:
        """Raise ``OSError`` when no more files can be open."""
        super().__init__()
        os.set_blocking(self._reading, False)
        os.set_blocking(self.writing, False)

    async def until_silent(self, seconds: float) -> None:
        """Return once no sign of life has come for ``seconds``."""
        silent = 0
        while silent * BEAT_SECONDS < seconds:
            await asyncio.sleep(BEAT_SECONDS)
            silent = 0 if self._has_beaten() else silent + 1

    def _has_beaten(self) -> bool:
        try:
            return bool(os.read(self._reading, _BYTES))
        except BlockingIOError:
            return False
