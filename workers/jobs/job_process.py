"""The process that does the work of jobs, so that it takes neither cores nor the interpreter from who trains and samples."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from contracts.errors import InvalidRequest, Unavailable
from workers.child_process import ChildProcess
from workers.jobs.work import Failed, Made, Moved, Postponed, Ready, Refused, Work, message_bytes, read_answer

IDLE_SECONDS = 60.0
"""Time without work after which the process ends, and gives its memory back."""
START_SECONDS = 600.0
"""Time in which the process must have loaded its libraries, on a busy machine too."""
log = logging.getLogger(__name__)


class JobProcessEnded(Exception):
    """The process ended while it worked."""


class WorkFailed(Exception):
    """The work failed in an unforeseen way; the text is its traceback."""


class WorkPostponed(Exception):
    """The work cannot be done now: the data folder, or a file of it, cannot be read."""


class JobProcess:
    """Process that does work, one at a time: started by the first, ended when it is idle. Usable on one event loop.

    What it is asked for is files in a folder. Nothing of a tenant is recorded there.
    """

    def __init__(self, idle: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle
        self._process: ChildProcess | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        return None if self._process is None else self._process.pid

    async def ready(self) -> None:
        """Have the process started. Raises ``Unavailable`` when it does not start; a cancelled call ends it."""
        self._stop_idling()
        if self.pid is not None:
            return
        await self.end()
        try:
            async with asyncio.timeout(START_SECONDS):
                self._process = await ChildProcess.start("workers.job_server")
                if not isinstance(read_answer(await self._process.receive()), Ready):
                    raise EOFError
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
            await self.end(at_once=True)
            raise Unavailable("the process that does the work of jobs does not start") from error
        except asyncio.CancelledError:
            await self.end(at_once=True)
            raise
        log.info("the process of jobs has started pid=%s", self.pid)

    async def do(self, work: Work, progress: Callable[[int, int], None]) -> Made:
        """Do ``work`` and tell its bytes by ``progress``, after ``ready``.

        A call that is cancelled kills the process, in the middle of its work. Raises ``InvalidRequest``,
        ``WorkPostponed``, ``WorkFailed`` and ``JobProcessEnded``.
        """
        try:
            if self._process is None:
                raise EOFError
            await self._process.send(message_bytes(work))
            while isinstance(answer := read_answer(await self._process.receive()), Moved):
                progress(answer.done, answer.total)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self.end(at_once=True)
            raise JobProcessEnded from error
        except asyncio.CancelledError:
            await self.end(at_once=True)
            raise
        self._rest()
        if isinstance(answer, Made):
            return answer
        if isinstance(answer, Refused):
            raise InvalidRequest(answer.message)
        if isinstance(answer, Postponed):
            raise WorkPostponed(answer.message)
        raise WorkFailed(answer.traceback if isinstance(answer, Failed) else "the process has not worked")

    async def end(self, *, at_once: bool = False) -> None:
        """End the process, in order or ``at_once``. The next work starts another."""
        self._stop_idling()
        process, self._process = self._process, None
        if process is not None:
            await process.end(at_once=at_once)

    async def close(self) -> None:
        """End the process in order, and wait until an idle one has ended."""
        await self.end()
        if self._ending is not None:
            await self._ending

    def _rest(self) -> None:
        self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self._end_idle)

    def _end_idle(self) -> None:
        self._ending = asyncio.create_task(self.end())

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
