"""A request being worked on, and the sequences (rows) it is sampled as."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from contracts.errors import EngineFailure, WeftError
from engine.model.lora import LoraWeights
from engine.sampling.event_stream import EventStream
from engine.sampling.in_process.adapter_store import Pin
from engine.sampling.in_process.outbox import Outbox
from engine.sampling.in_process.prompt_scores import NOT_FINITE, PromptScores
from engine.sampling.in_process.token_choice import uniform_stream
from engine.sampling.replica import Ended, EndReason, GenerateRequest, NewToken, PromptScored


class Job:
    """One ``GenerateRequest`` until its last sequence has ended.

    Only the worker's thread changes it; its events leave through ``outbox`` to ``stream``. ``on_end`` is called once,
    on the worker's thread.
    """

    def __init__(self, request: GenerateRequest, outbox: Outbox, on_end: Callable[["Job"], None]) -> None:
        self.request = request
        self.stream = EventStream()
        self.lease: Pin | None = None
        self.adapter: LoraWeights | None = None
        self.scores = PromptScores(request.prompt, request.scoring) if request.scoring else None
        self.begun = False
        """Whether any sequence was ever started."""
        self._outbox = outbox
        self._on_end = on_end
        self._open = set(range(len(request.seeds)))
        self._unbegun = deque(range(len(request.seeds)))

    @property
    def prompt_length(self) -> int:
        """P, in tokens."""
        return len(self.request.prompt)

    @property
    def final_length(self) -> int:
        """Most tokens a sequence can come to, prompt included."""
        return self.prompt_length + self.request.max_tokens

    @property
    def live(self) -> bool:
        """False once every sequence has ended: whatever still runs for it can be dropped."""
        return bool(self._open)

    @property
    def order(self) -> tuple[str, str]:
        """Sort key that puts rows of one adapter version side by side."""
        adapter = self.request.adapter
        return ("", "") if adapter is None else (adapter.name, str(adapter.directory))

    @property
    def unbegun(self) -> int:
        """Sequences yet to be started."""
        return len(self._unbegun)

    def begin(self, count: int) -> list["Row"]:
        """The next ``count`` sequences as new rows."""
        self.begun = True
        return [Row(self, self._unbegun.popleft()) for _ in range(count)]

    def is_open(self, index: int) -> bool:
        """Whether sequence ``index`` has not ended."""
        return index in self._open

    def report_scores(self) -> None:
        """Send the prompt's scores, if they were asked for; once, when the whole prompt is in."""
        if self.scores is not None:
            self._outbox.add(self.stream, PromptScored(self.scores.logprobs, self.scores.topk))

    def report(self, token: NewToken) -> None:
        """Send the next token of a sequence."""
        self._outbox.add(self.stream, token)

    def end(self, index: int, reason: EndReason) -> None:
        """Sequence ``index`` has ended; the last one ends the job."""
        self._open.remove(index)
        self._outbox.add(self.stream, Ended(index, reason))
        if not self._open:
            self._close(None)

    def cut(self, index: int | None, waiter: asyncio.Future[bool]) -> None:
        """End sequence ``index``, or all of them, where they are; what has already ended stays as it is.

        ``waiter`` then learns whether the request was still outstanding.
        """
        was_live = self.live
        for chosen in sorted(self._open) if index is None else self._open & {index}:
            if chosen in self._unbegun:
                self._unbegun.remove(chosen)
            self.end(chosen, "cut")
        self._outbox.answer(waiter, was_live)

    def fail(self, error: WeftError) -> None:
        """End with ``error``, unless it has ended already."""
        if self.live:
            self._close(error)

    def drop(self) -> None:
        """End without a word: nobody reads the stream any more."""
        if self.live:
            self._close(None)

    def _close(self, error: WeftError | None) -> None:
        self._open.clear()
        self._unbegun.clear()
        self._outbox.end(self.stream, error)
        self._on_end(self)


@dataclass(slots=True, eq=False)
class Row:
    """One sequence while it decodes. ``made`` counts its tokens, ``newest`` is the last of them."""

    job: Job
    index: int
    uniforms: np.random.Generator = field(init=False)
    made: int = 0
    newest: int = -1

    def __post_init__(self) -> None:
        self.uniforms = uniform_stream(self.job.request.seeds[self.index])

    @property
    def params(self) -> GenerateRequest:
        """The rules of choice."""
        return self.job.request

    @property
    def topk(self) -> int:
        """How many likeliest tokens to report per position."""
        return self.job.request.topk

    @property
    def cached(self) -> int:
        """Tokens in the cache: all but the newest, which the next forward takes in."""
        return self.job.prompt_length + self.made - 1

    @property
    def runs(self) -> bool:
        """Whether it needs another forward."""
        return self.job.is_open(self.index)

    def accept(self, token: int, logprob: float, topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None) -> None:
        """Take the next token: its logprob, NaN or infinite when the logits were bad, and the top ids and logprobs."""
        if not math.isfinite(logprob):
            self.job.fail(EngineFailure(NOT_FINITE))
            return
        self.made += 1
        self.newest = token
        self.job.report(NewToken(self.index, token, logprob, topk))
        if token in self.job.request.stop_tokens:
            self.job.end(self.index, "stop")
        elif self.made >= self.job.request.max_tokens:
            self.job.end(self.index, "length")
