"""A generate request inside the in-process replica, and each sequence of it while it decodes."""

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
from engine.sampling.in_process.prompt_scores import NOT_FINITE
from engine.sampling.in_process.token_choice import uniform_stream
from engine.sampling.replica import Ended, EndReason, GenerateRequest, NewToken, PromptScored


class Job:
    """One ``GenerateRequest`` until its last sequence has ended.

    Only the worker's thread changes a job. Its events go through ``outbox`` to ``stream``. ``on_end`` is called once, on
    the worker's thread. So is ``on_unused``, with tokens that seats of the job were charged and that it does not use.
    """

    on_unused: Callable[[int], None] | None = None

    def __init__(self, request: GenerateRequest, outbox: Outbox, on_end: Callable[["Job"], None]) -> None:
        self.request = request
        self.stream = EventStream()
        self.pin: Pin | None = None
        self.adapter: LoraWeights | None = None
        self.begun = False
        """True once any sequence was started."""
        self.seated = 0
        """Sequences yet to be started that have a seat in the batch."""
        self._unread = 0
        """Tokens of the prompt that were charged and have not been in a forward pass."""
        self._outbox = outbox
        self._on_end = on_end
        self._open = set(range(len(request.seeds)))
        self._unbegun = deque(range(len(request.seeds)))
        self._running: dict[int, RunningSequence] = {}

    @property
    def prompt_length(self) -> int:
        """P, in tokens."""
        return len(self.request.prompt)

    @property
    def final_length(self) -> int:
        """Largest possible length of a sequence, in tokens, prompt included."""
        return self.prompt_length + self.request.max_tokens

    @property
    def live(self) -> bool:
        """True until every sequence has ended; then all work for the job can be dropped."""
        return bool(self._open)

    @property
    def adapter_key(self) -> tuple[str, str]:
        """Sort and group key of the adapter version: its name and folder, empty for the bare base."""
        adapter = self.request.adapter
        return ("", "") if adapter is None else (adapter.name, str(adapter.directory))

    @property
    def unbegun(self) -> int:
        """Number of sequences yet to be started."""
        return len(self._unbegun)

    @property
    def seatless(self) -> int:
        """Number of sequences yet to be started that have no seat."""
        return len(self._unbegun) - self.seated

    @property
    def next_is_first(self) -> bool:
        """True while no sequence has or had a seat. The first one's seat is charged the prompt, too."""
        return not self.begun and not self.seated

    def take_seats(self, count: int) -> None:
        """Note that ``count`` more sequences have a seat, and that it was charged."""
        if self.next_is_first:
            self._unread = self.prompt_length
        self.seated += count

    def note_read(self, tokens: int) -> None:
        """Note that the first ``tokens`` of the prompt have been in a forward pass."""
        self._unread = min(self._unread, self.prompt_length - tokens)

    def begin(self) -> list["RunningSequence"]:
        """Start the sequences that have a seat."""
        count, self.seated = self.seated, 0
        self.begun = True
        begun = [RunningSequence(self, self._unbegun.popleft()) for _ in range(count)]
        self._running.update((one.index, one) for one in begun)
        return begun

    def is_open(self, index: int) -> bool:
        """Tell whether sequence ``index`` has not ended."""
        return index in self._open

    def report_scores(self, scores: PromptScored) -> None:
        """Send the prompt's scores. Call once, after the whole prompt is prefilled."""
        self._outbox.add(self.stream, scores)

    def report(self, token: NewToken) -> None:
        """Send the next token of a sequence."""
        self._outbox.add(self.stream, token)

    def end(self, index: int, reason: EndReason) -> None:
        """End sequence ``index``; the last one ends the job."""
        self._open.remove(index)
        if index in self._running:
            self._credit(self._running.pop(index).undrawn)
        self._outbox.add(self.stream, Ended(index, reason))
        if not self._open:
            self._close(None)

    def cut(self, index: int | None, waiter: asyncio.Future[bool]) -> None:
        """End sequence ``index``, or every sequence, with the tokens made so far. Ended sequences do not change.

        Resolves ``waiter`` after the sequences' events: True if the job was live.
        """
        was_live = self.live
        for chosen in sorted(self._open) if index is None else self._open & {index}:
            if chosen in self._unbegun:
                self._unbegun.remove(chosen)
                self._leave_seats(max(0, self.seated - len(self._unbegun)))
            self.end(chosen, "cut")
        self._outbox.answer(waiter, was_live)

    def fail(self, error: WeftError) -> None:
        """End the job with ``error``, unless it has ended already."""
        if self.live:
            self._close(error)

    def drop(self) -> None:
        """End the job without an error, because its stream has no reader any more."""
        if self.live:
            self._close(None)

    def _close(self, error: WeftError | None) -> None:
        self._open.clear()
        self._unbegun.clear()
        self._leave_seats(self.seated)
        self._credit(self._unread + sum(one.undrawn for one in self._running.values()))
        self._running.clear()
        self._outbox.end(self.stream, error)
        self._on_end(self)

    def _leave_seats(self, count: int) -> None:
        """Give up seats of sequences that never begin."""
        self.seated -= count
        self._credit(count * self.request.max_tokens)

    def _credit(self, tokens: int) -> None:
        if self.on_unused is not None:
            self.on_unused(tokens)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One sequence of a job while it decodes. ``made`` counts its tokens; ``newest`` is the last one."""

    job: Job
    index: int
    uniforms: np.random.Generator = field(init=False)
    made: int = 0
    newest: int = -1

    def __post_init__(self) -> None:
        self.uniforms = uniform_stream(self.job.request.seeds[self.index])

    @property
    def params(self) -> GenerateRequest:
        """Request, whose parameters choose the sequence's tokens."""
        return self.job.request

    @property
    def topk(self) -> int:
        """Number of likeliest tokens to report at each position."""
        return self.job.request.topk

    @property
    def undrawn(self) -> int:
        """Number of tokens that the sequence's seat was charged and that are not drawn."""
        return self.job.request.max_tokens - self.made

    @property
    def cached(self) -> int:
        """Number of tokens in the KV cache: all but the newest, which the next forward pass adds."""
        return self.job.prompt_length + self.made - 1

    @property
    def runs(self) -> bool:
        """True while the sequence needs another forward pass."""
        return self.job.is_open(self.index)

    def append(self, token: int, logprob: float, topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None) -> None:
        """Append the next token and report it; end the sequence at a stop token or at its length.

        ``topk`` holds ids int32 (k,) and logprobs float32 (k,). A ``logprob`` that is not finite fails the job.
        """
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
