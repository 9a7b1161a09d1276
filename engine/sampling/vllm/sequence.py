"""One sequence on a vLLM server: a stream of its own, read to its end, cut or left."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.sampling.event_stream import EventStream
from engine.sampling.replica import Ended, EndReason, NewToken
from engine.sampling.vllm.aborts import VllmAborts
from engine.sampling.vllm.http import Answer, VllmHttp
from engine.sampling.vllm.logprobs import checked, topk_of
from engine.sampling.vllm.messages import Choice, Chunk, EventLines

GENERATE = "/inference/v1/generate"
_ID_PREFIX = "generate-tokens-"
_FIRST_WAIT_S = 0.05
_log = logging.getLogger(__name__)


class AdapterLost(EngineFailure):
    """The server does not know the adapter: it was restarted, or somebody else unloaded it."""


class VllmSequence:
    """Sequence ``index`` of a request; its events go to ``stream`` until it ``is_muted``.

    ``topk``: how many likeliest tokens each comes with. ``heard`` is called whenever the server sends something.
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
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: WeftError | None = None
        self.is_sent = False
        self.is_muted = False

    @property
    def is_live(self) -> bool:
        """Whether it may still bring tokens."""
        return not self._over.is_set()

    @property
    def has_begun(self) -> bool:
        """Whether it has a token."""
        return self._tokens > 0

    def start(self, drawing: Callable[["VllmSequence"], Awaitable[None]]) -> asyncio.Task[None]:
        """A task that awaits ``drawing``, unless what it is about ends first; it raises what the sequence fails with."""
        self._task = asyncio.create_task(self._guard(drawing))
        return self._task

    async def draw(
        self, http: VllmHttp, request_id: str, body: Mapping[str, Any], *, on_first: Callable[[], None]
    ) -> None:
        """Send ``body`` under ``request_id`` and read the answer to its end; ``on_first`` is called with its first token.

        Raises ``AdapterLost`` before any token, ``InvalidRequest`` and ``EngineFailure``.
        """
        self._server_id = _ID_PREFIX + request_id
        self._on_first = on_first
        self.is_sent = True
        try:
            async with http.stream(GENERATE, {**body, "request_id": request_id}) as response:
                if response.status != 200:
                    raise _refused(http, Answer(response.status, await response.read()))
                await self._read(http, response)
        finally:
            self.is_sent = False
        if self.is_live:
            raise EngineFailure("the replica's answer broke off before the sequence had ended")

    async def cut(self, aborts: VllmAborts) -> None:
        """End it where it is, with ``Ended`` after every token made; what has ended stays as it is.

        Raises ``EngineFailure`` when the server does not confirm in time; its connection is closed then.
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
                await self._abort_until_over(aborts)
        except (TimeoutError, EngineFailure) as error:
            if self.is_live:
                self._fail(EngineFailure("the replica did not confirm that the sequence was cut"))
                _log.warning("sequence %s: the cut was not confirmed", self._server_id, exc_info=error)
        if self._failure is not None:
            raise self._failure

    def expect_abort(self) -> None:
        """From now on an abort by the server is a cut, no failure."""
        self._is_cut = True

    async def leave(self, aborts: VllmAborts) -> None:
        """End it for a reader who has gone: certainly over at the server when this returns, if that answers at all."""
        self.is_muted = True
        try:
            await self.cut(aborts)
        except WeftError as error:
            _log.info("sequence %s was left: %s", self._server_id, error.message)
        if self._task is not None:
            await asyncio.wait([self._task], timeout=aborts.deadline_s)
        self._stop()

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
        """The server ignores ids that it does not know, and it may be about to get to know this one: ask again."""
        wait_s = _FIRST_WAIT_S
        while True:
            # One that did not get through says nothing of the sequence: its stream does, or the next one.
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
            self._heard()
            for payload in lines.feed(data):
                if payload == b"[DONE]":
                    return
                self._take(http.decode(payload, Chunk))

    def _take(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            _log.warning("sequence %s: the replica says %s", self._server_id, chunk.error)
            if chunk.error.code == 400:
                raise InvalidRequest("the sampler refused the prompt: its length or one of its tokens")
            raise EngineFailure("the replica failed while it made the sequence")
        self._server_id = chunk.request_id or self._server_id
        for choice in chunk.choices:
            tokens = self._new_tokens(choice)
            is_first = bool(tokens) and not self._tokens
            self._tokens += len(tokens)
            if tokens and not self.is_muted:
                self._stream.put(tokens)
            if is_first:
                # Behind the token: it lets the next prompt go, for which nobody waits as long.
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
        self._end(reasons[choice.finish_reason])

    def _end(self, reason: EndReason) -> None:
        if not self.is_muted:
            self._stream.put([Ended(self.index, reason)])
        self._over.set()

    def _fail(self, failure: WeftError) -> None:
        self._failure = self._failure or failure
        self._over.set()
        self._stop()

    def _stop(self) -> None:
        """Cancel the task, which closes the connection."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


def _refused(http: VllmHttp, answer: Answer) -> WeftError:
    # The route is there, or the replica would not have started: only the name can be unknown.
    if answer.status == 404:
        return AdapterLost("the replica has lost the adapter")
    return http.refusal(answer)
