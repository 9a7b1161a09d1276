"""The trainer's forward in a process of its own, for a process that samples without the base in memory."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from contracts.base_model import BaseModelFacts
from contracts.errors import EngineFailure, WeftError
from engine.sampling.background_tasks import BackgroundTasks
from engine.sampling.forward_messages import (
    TOKEN_BYTES,
    Answer,
    Load,
    Refused,
    Request,
    Score,
    Scored,
    WriteAdapters,
    Written,
    message_bytes,
    read_answer,
)
from engine.sampling.forward_queue import ForwardQueue
from engine.sampling.replica import UNSCALED, AdapterVersion, Draws, PromptScored, PromptScoring
from engine.sampling.trainer_forward import HandshakeAdapters
from workers.child_process import ChildProcess

IDLE_SECONDS = 60.0
"""Time without a request after which the process ends, and gives the base's memory back."""
ANSWER_SECONDS = 600.0
"""Longest time that the process may take to answer, the tokens of a prompt aside."""
LOAD_SECONDS = 1200.0
"""Time in which the process must have loaded the base, before its first answer."""
TOKEN_SECONDS = 0.1
"""Longest time for each token of a prompt: a base of 70 billion parameters on a few cores."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that the process is waited for: without a request, for an answer, and for the base besides."""

    idle: float = IDLE_SECONDS
    answer: float = ANSWER_SECONDS
    load: float = LOAD_SECONDS


class ForwardProcess:
    """``TrainerForward`` over a process that loads the base on the CPU: started by a request, ended when it is idle.

    Usable on one event loop. Requests are computed one after another. A process that does not answer in time is ended; the
    next request starts another.
    """

    def __init__(self, facts: BaseModelFacts, *, dtype: str, patience: Patience | None = None) -> None:
        self._load = Load(facts, dtype)
        self._patience = patience or Patience()
        self._process: ChildProcess | None = None
        self._has_answered = False
        """True once the process of now has answered: then it has the base in memory."""
        self._waiting: ForwardQueue[Request, Answer] = ForwardQueue()
        self._serving: asyncio.Task[None] | None = None
        self._background = BackgroundTasks()
        self._idle: asyncio.TimerHandle | None = None
        self._holders = 0

    @property
    def pid(self) -> int | None:
        """Process that has the base in memory now; None while there is none."""
        return None if self._process is None else self._process.pid

    async def score(
        self,
        adapter: AdapterVersion | None,
        prompt: NDArray[np.int64],
        scoring: PromptScoring,
        draws: Draws = UNSCALED,
        *,
        first: bool = False,
    ) -> PromptScored:
        """See ``TrainerForward.score``."""
        answer = await self._ask(Score.of(adapter, prompt, scoring, draws), first=first)
        if not isinstance(answer, Scored):
            raise _failed()
        return answer.scores(scoring)

    async def handshake_adapters(self, folder: Path, *, rank: int, with_head: bool) -> HandshakeAdapters:
        """See ``TrainerForward.handshake_adapters``."""
        answer = await self._ask(WriteAdapters(str(folder), rank, with_head), first=True)
        if not isinstance(answer, Written):
            raise _failed()
        return answer.adapters

    @contextmanager
    def held(self) -> Iterator[None]:
        """See ``TrainerForward.held``."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._rest()

    def check(self) -> None:
        """See ``TrainerForward.check``. No device of this process computes the forward."""

    async def close(self) -> None:
        """See ``TrainerForward.close``."""
        self._stop_idling()
        self._waiting.fail(EngineFailure("the sampler was closed before the trainer's forward answered"))
        await self._background.close(0)
        await self._end()

    async def _ask(self, request: Request, *, first: bool) -> Answer:
        found = self._waiting.put(request, first=first)
        self._stop_idling()
        if self._serving is None or self._serving.done():
            self._serving = self._background.start(self._serve())
        answer = await found
        if isinstance(answer, Refused):
            raise answer.error()
        return answer

    async def _serve(self) -> None:
        """Answer what waits, one request after another. However it ends, every asker gets an answer or an error."""
        try:
            while (asked := self._waiting.take()) is not None:
                try:
                    asked.end(await self._answer(asked.question))
                except WeftError as error:
                    asked.end(error)
                finally:
                    asked.end(_failed())
        finally:
            self._waiting.fail(_failed())
        self._rest()

    async def _answer(self, request: Request) -> Answer:
        tokens = len(request.prompt) // TOKEN_BYTES if isinstance(request, Score) else 0
        seconds = self._patience.answer + TOKEN_SECONDS * tokens
        try:
            process = await self._started()
            seconds += 0 if self._has_answered else self._patience.load
            async with asyncio.timeout(seconds):
                answer = await self._exchange(process, request)
        except TimeoutError as error:
            log.warning("the trainer's forward did not answer in %.0f s and was ended pid=%s", seconds, self.pid)
            await self._end(at_once=True)
            raise EngineFailure(
                f"the trainer's forward did not answer in {seconds:.0f} s; it was ended, and the next request starts it again"
            ) from error
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self._end()
            raise _failed() from error
        except asyncio.CancelledError:
            await self._end()
            raise
        self._has_answered = True
        return answer

    async def _started(self) -> ChildProcess:
        if self._process is None or self._process.pid is None:
            self._process = await ChildProcess.start("workers.forward_server")
            self._has_answered = False
            log.info("loading base model %s for the trainer's forward pid=%s", self._load.facts.name, self.pid)
        return self._process

    async def _exchange(self, process: ChildProcess, request: Request) -> Answer:
        for message in (request,) if self._has_answered else (self._load, request):
            await process.send(message_bytes(message))
        return read_answer(await process.receive())

    def _rest(self) -> None:
        """Have the process end after a time without a request, unless it is held or has work."""
        self._stop_idling()
        if not self._holders and self._waiting.next() is None:
            self._idle = asyncio.get_running_loop().call_later(self._patience.idle, self._end_idle)

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()

    def _end_idle(self) -> None:
        if self._serving is None or self._serving.done():
            self._background.start(self._end())

    async def _end(self, *, at_once: bool = False) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end(at_once=at_once)


def _failed() -> EngineFailure:
    return EngineFailure("the trainer's forward ended before it answered, possibly for lack of memory")
