"""One sequence on a vLLM server: sends its request, reads its stream, and ends it by a cut or an abort."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

import aiohttp

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.sampling.event_stream import EventStream
from engine.sampling.replica import Ended, EndReason, GenerateEvent, NewToken, PromptCached
from engine.sampling.vllm.aborts import VllmAborts
from engine.sampling.vllm.http import Answer, VllmHttp
from engine.sampling.vllm.logprobs import checked, topk_of
from engine.sampling.vllm.messages import Choice, Chunk, EventLines

GENERATE = "/inference/v1/generate"
_ID_PREFIX = "generate-tokens-"
_FIRST_WAIT_S = 0.05
_log = logging.getLogger(__name__)


class AdapterLost(EngineFailure):
    """Failure of a request for an adapter that the server no longer has: it was restarted, or the adapter was unloaded."""


class VllmSequence:
    """Sequence ``index`` of a request. Its events go to ``stream`` while ``is_muted`` is false.

    ``topk``: number of likeliest tokens to report with each token. ``heard`` is called whenever the server's
    engine shows that it works.
    """

    def __init__(self, index: int, topk: int, stream: EventStream, heard: Callable[[], None]) -> None:
        self.index = index
        self._topk = topk
        self._stream = stream
        self._heard = heard
        self._server_id = ""
        self._on_first: Callable[[], None] = lambda: None
        self._tokens = 0
        self._is_cut = False
        self._reason: EndReason | None = None
        """Reason of the end once the server has told it; what it counted comes after."""
        self._last: list[GenerateEvent] = []
        """Events for the reader that wait for the end of the stream: its last tokens, and what the server counted.

        A reader that got them sooner could leave before the end, and the server would be asked to abort what is over.
        """
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: WeftError | None = None
        self.is_sent = False
        self.sent_at = 0.0
        """Monotonic seconds when the request was last sent."""
        self.heard_at = 0.0
        """Monotonic seconds from which the sequence's silence counts."""
        self.is_muted = False

    @property
    def is_live(self) -> bool:
        """True while the sequence may bring tokens."""
        return not self._over.is_set()

    @property
    def has_begun(self) -> bool:
        """True once the sequence has a token."""
        return self._tokens > 0

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return self._tokens

    def start(self, drawing: Callable[["VllmSequence"], Awaitable[None]]) -> asyncio.Task[None]:
        """Start and return the task that awaits ``drawing(self)``.

        A cut before the request is sent cancels the task. The task raises the sequence's failure, if it has one.
        """
        self._task = asyncio.create_task(self._guard(drawing))
        return self._task

    async def draw(
        self, http: VllmHttp, request_id: str, body: Mapping[str, Any], *, on_first: Callable[[], None]
    ) -> None:
        """Send ``body`` as ``request_id`` and read the answer to its end; call ``on_first`` after its first token.

        Raises ``AdapterLost`` (only before the first token), ``InvalidRequest`` and ``EngineFailure``.
        """
        self._server_id = _ID_PREFIX + request_id
        self._on_first = on_first
        self.is_sent = True
        self.sent_at = self.heard_at = monotonic()
        try:
            async with http.stream(GENERATE, {**body, "request_id": request_id}) as response:
                if response.status != 200:
                    raise _refused(http, Answer(response.status, await response.read()))
                await self._read(http, response)
        finally:
            self.is_sent = False
        if self._reason is not None:
            self._end(self._reason)
        if self.is_live:
            raise EngineFailure("the replica's answer broke off before the sequence had ended")

    async def cut(self, aborts: VllmAborts) -> None:
        """End the sequence with the tokens made so far, and ``Ended`` after the last. An ended sequence does not change.

        Raises ``EngineFailure`` when the server does not confirm the end in time; the connection is closed then.
        """
        if not self.is_live:
            return
        self.expect_abort()
        if not self.is_sent:
            self._end("cut")
            self._stop()
            return
        try:
            async with asyncio.timeout(aborts.deadline_s):
                # What the server has ended by itself needs no abort: the rest of its stream is on the way.
                await (self._abort_until_over(aborts) if self._reason is None else self._over.wait())
        except (TimeoutError, EngineFailure) as error:
            if self.is_live:
                self._fail(EngineFailure("the replica did not confirm that the sequence was cut"))
                _log.warning("sequence %s: the cut was not confirmed", self._server_id, exc_info=error)
        if self._failure is not None:
            raise self._failure

    def expect_abort(self) -> None:
        """Count an abort by the server as a cut from now on, not as a failure."""
        self._is_cut = True

    async def abandon(self, aborts: VllmAborts) -> None:
        """End a sequence without a reader. On return the sequence has ended on the server too, if the server answers."""
        self.is_muted = True
        try:
            await self.cut(aborts)
        except WeftError as error:
            _log.info("sequence %s was left: %s", self._server_id, error.message)
        if self._task is not None:
            await asyncio.wait([self._task], timeout=aborts.deadline_s)
        self._stop()

    async def lose(self, aborts: VllmAborts, failure: WeftError) -> None:
        """Fail a sequence whose stream is silent, and abort it: the server may draw it still."""
        with suppress(EngineFailure):
            await aborts.ask(self._server_id)
        if self.is_live:
            self._fail(failure)

    async def _guard(self, drawing: Callable[["VllmSequence"], Awaitable[None]]) -> None:
        try:
            await drawing(self)
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise
        except WeftError as error:
            self._fail(error)
            raise

    async def _abort_until_over(self, aborts: VllmAborts) -> None:
        """Abort at growing intervals until the stream ends: the server ignores an abort that overtakes its request."""
        wait_s = _FIRST_WAIT_S
        while True:
            # A failed abort says nothing about the sequence: its stream or the next abort does.
            with suppress(EngineFailure):
                await aborts.ask(self._server_id)
            try:
                async with asyncio.timeout(wait_s):
                    await self._over.wait()
                    return
            except TimeoutError:
                wait_s *= 2

    async def _read(self, http: VllmHttp, response: aiohttp.ClientResponse) -> None:
        lines = EventLines()
        async for data in response.content.iter_any():
            for payload in lines.feed(data):
                if payload == b"[DONE]":
                    return
                self._read_chunk(http.decode(payload, Chunk))

    def _read_chunk(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            _log.warning("sequence %s: the replica says %s", self._server_id, chunk.error)
            if chunk.error.code == 400:
                raise InvalidRequest(
                    "the sampler refused the prompt, for its length or one of its tokens, or a schema in response_format or tools"
                )
            raise EngineFailure("the replica failed while it made the sequence")
        self._server_id = chunk.request_id or self._server_id
        if chunk.usage is not None:
            self._last.append(PromptCached(chunk.usage.cached))
        for choice in chunk.choices:
            if choice.finish_reason != "abort":
                # The server's front ends an aborted sequence, also while the engine hangs.
                self.heard_at = monotonic()
                self._heard()
            tokens = self._new_tokens(choice)
            is_first = bool(tokens) and not self._tokens
            self._tokens += len(tokens)
            if choice.finish_reason is not None:
                self._last += tokens
            elif tokens and not self.is_muted:
                self._stream.put(tokens)
            if is_first:
                # Called after the token: the call starts another prompt, which is less urgent.
                self._on_first()
            if choice.finish_reason is not None:
                self._finish(choice)

    def _new_tokens(self, choice: Choice) -> list[NewToken]:
        ids = choice.token_ids or []
        content = (choice.logprobs.content if choice.logprobs else None) or []
        if [entry.token_id for entry in content] != ids:
            raise EngineFailure("the replica sent tokens without their logprobs")
        return [
            NewToken(
                self.index,
                entry.token_id,
                checked(entry.logprob),
                topk_of(entry, self._topk) if self._topk else None,
            )
            for entry in content
        ]

    def _finish(self, choice: Choice) -> None:
        spans = choice.weight_versions
        if spans is None or (spans[-1].end if spans else 0) != self._tokens:
            raise EngineFailure("the replica's tokens did not all arrive")
        reasons: dict[str | None, EndReason] = {"stop": "stop", "length": "length"}
        if self._is_cut:
            reasons["abort"] = "cut"
        if choice.finish_reason not in reasons:
            raise EngineFailure(f"the replica ended the sequence by itself ({choice.finish_reason})")
        self._reason = reasons[choice.finish_reason]

    def _end(self, reason: EndReason) -> None:
        self._put_last(Ended(self.index, reason))
        self._over.set()

    def _fail(self, failure: WeftError) -> None:
        self._failure = self._failure or failure
        self._put_last()
        self._over.set()
        self._stop()

    def _put_last(self, *after: Ended) -> None:
        """Put the events that have waited for the end of the stream, and ``after``, into the reader's stream together."""
        events, self._last = [*self._last, *after], []
        if events and not self.is_muted:
            self._stream.put(events)

    def _stop(self) -> None:
        """Cancel the task, which closes the connection."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


def _refused(http: VllmHttp, answer: Answer) -> WeftError:
    # The route exists, or the replica would not have started. So 404 is for the adapter's name.
    if answer.status == 404:
        return AdapterLost("the replica has lost the adapter")
    return http.refusal(answer)
