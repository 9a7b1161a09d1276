"""The sampling replica over a stock vLLM server: sends requests over HTTP, one stream for each sequence."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any
from uuid import uuid4

import numpy as np

from contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.sampling.background_tasks import BackgroundTasks
from engine.sampling.engine_failure import as_weft_error
from engine.sampling.replica import (
    AdapterVersion,
    GenerateEvent,
    GenerateRequest,
    PromptCached,
    PromptScored,
    PromptScoring,
    ReplicaHealth,
    turn_taker,
)
from engine.sampling.trainer_forward import TrainerForward
from engine.sampling.vllm.aborts import VllmAborts
from engine.sampling.vllm.adapter_files import write_zero_adapter
from engine.sampling.vllm.adapters import Pin, VllmAdapters
from engine.sampling.vllm.http import Answer, VllmHttp
from engine.sampling.vllm.logprobs import prompt_scores
from engine.sampling.vllm.messages import Drawn, ScoredPrompt, Sleeping
from engine.sampling.vllm.places import Places
from engine.sampling.vllm.prompt_budget import PromptBudget, Reservation
from engine.sampling.vllm.prompt_probes import AT_ONCE, PromptProbes
from engine.sampling.vllm.request import VllmRequest, check
from engine.sampling.vllm.sequence import GENERATE, AdapterLost, VllmSequence
from engine.sampling.vllm.settings import VllmReplicaSettings
from engine.sampling.vllm.silence import SilenceWatch
from engine.sampling.vllm.startup import check_server

# The bare base is sampled through an adapter that changes nothing. Without it, a CPU build of vLLM answers requests for
# the base with the adapter in its last slot whenever the batch holds an adapter.
ZERO_ADAPTER = "weft:zero"
SCORED_TOGETHER = 64
"""Prompts that the trainer's forward is given at once, to score them together; others wait and take turns."""


class VllmReplica:
    """``SamplerReplica`` over a running vLLM server. Usable on one event loop: the loop of ``start``.

    No other client may use the server: the replica must know of every request on the server.
    """

    def __init__(self, settings: VllmReplicaSettings, forward: TrainerForward | None = None) -> None:
        """``forward`` scores prompts where adapters may change the head; None: such a server's prompts are not scored."""
        self._settings = settings
        self._forward = forward
        self._http = VllmHttp(settings.name, settings.base_url, settings.api_key, settings.max_streams)
        self._loads = BackgroundTasks()
        self._adapters = VllmAdapters(self._http, settings, self._loads)
        self._requests: dict[str, VllmRequest] = {}
        self._background = BackgroundTasks()
        self._aborts = VllmAborts(self._http, self._background, settings.cut_deadline_s)
        self._places = Places(settings.max_streams)
        self._forwards = Places(SCORED_TOGETHER)
        self._prompts = PromptBudget(settings.prompt_tokens)
        self._watch: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._silence = SilenceWatch(self._http, settings, self._requests, self._aborts)
        self._longest = 0
        """Most tokens of a prompt and what is drawn after it; the server tells it at the start."""
        self._is_ready = False

    @property
    def name(self) -> str:
        """See ``SamplerReplica.name``."""
        return self._settings.name

    async def start(self) -> None:
        """Compare the server with the settings and warm it up. The warm-up may compile for half a minute.

        Raises ``InvalidRequest`` for a server that does not fit the settings, ``EngineFailure`` for a server that fails.
        """
        await self._http.open()
        warm = False
        try:
            async with asyncio.timeout(self._settings.start_deadline_s):
                self._longest = await check_server(self._http, self._settings)
                await self._wake_sleeper()
                await asyncio.to_thread(write_zero_adapter, self._settings.zero_adapter, self._settings.base.path)
                async with self._adapters.pin(self._zero, "", permanent=True):
                    self._is_ready = True
                    await self._warm_up()
            warm = True
        except TimeoutError as error:
            raise EngineFailure(f"replica {self.name} did not start in time") from error
        finally:
            if not warm:
                self._is_ready = False
                await self._http.close()
        self._watch = asyncio.create_task(self._silence.run(self._closing))

    async def close(self) -> None:
        """See ``SamplerReplica.close``. The server keeps running, without this replica's sequences."""
        self._is_ready = False
        self._closing.set()
        self._silence.fail_all(EngineFailure("the sampler was closed before the request was done"))
        if self._watch is not None:
            await asyncio.wait([self._watch])
        tasks = [request.task for request in self._requests.values() if request.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        await self._loads.close(0)
        await self._background.close(2 * self._settings.cut_deadline_s)
        await self._http.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[GenerateEvent]]:
        """See ``SamplerReplica.generate``."""
        if not self._is_ready:
            raise EngineFailure("the sampler is not running")
        check(request, self._settings, self._longest)
        if request.request_id in self._requests:
            raise EngineFailure(f"request {request.request_id} is already being sampled")
        running = self._requests[request.request_id] = VllmRequest(request, self._silence.heard)
        running.task = asyncio.create_task(self._run(running))
        try:
            while (events := await running.stream.next()) is not None:
                yield events
        finally:
            del self._requests[request.request_id]
            running.task.cancel()

    async def cut(self, request_id: str, index: int | None = None) -> bool:
        """See ``SamplerReplica.cut``."""
        running = self._requests.get(request_id)
        if running is None or not running.is_live:
            return False
        chosen = running.chosen(index)
        ends = await asyncio.gather(*(sequence.cut(self._aborts) for sequence in chosen), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end
        if not (running.is_live or running.is_drawing) and running.task is not None:
            # The request waits for its adapter or its scores, which are no longer needed.
            running.stream.end(None)
            running.task.cancel()
        return True

    async def load(self, version: AdapterVersion, *, owner: str = "", share: float = 1.0) -> None:
        """See ``SamplerReplica.load``."""
        if not self._is_ready:
            raise EngineFailure("the sampler is not running")
        async with self._adapters.pin(version, turn_taker(owner, version), share):
            return

    async def unload(self, name: str) -> None:
        """See ``SamplerReplica.unload``.

        The version's folder must stay until the requests that use it have ended: vLLM may read it again for them, and
        dies when the folder is gone.
        """
        await self._adapters.unload(name)

    async def sleep(self) -> None:
        """See ``SamplerReplica.sleep``. New requests wait. Level 1: level 2 would drop the weights.

        Raises ``InvalidRequest`` for a server that is not in development mode, ``EngineFailure`` for one that fails.
        """
        self._expect_aborts()
        await self._operate("/sleep?level=1", self._settings.load_deadline_s)

    async def wake_up(self) -> None:
        """See ``SamplerReplica.wake_up``."""
        await self._operate("/wake_up", self._settings.load_deadline_s)

    async def health(self) -> ReplicaHealth:
        """See ``SamplerReplica.health``. A server that listens while its engine hangs is alive."""
        requests = [request for request in self._requests.values() if request.is_live]
        running = sum(s.is_live and s.has_begun for request in requests for s in request.sequences)
        waiting = sum(not any(s.has_begun for s in request.sequences) for request in requests)
        is_alive = self._is_ready and await self._silence.answers()
        return ReplicaHealth(is_alive, running, waiting, self._adapters.names(), hangs=self._silence.hangs)

    @property
    def settings(self) -> VllmReplicaSettings:
        """Settings of the replica."""
        return self._settings

    @property
    def _zero(self) -> AdapterVersion:
        return AdapterVersion(ZERO_ADAPTER, self._settings.zero_adapter)

    async def _operate(self, path: str, deadline_s: float) -> None:
        answer = await self._http.post(path, None, deadline_s)
        if answer.status == 404:
            raise InvalidRequest(f"replica {self.name}: its server is not in development mode (VLLM_SERVER_DEV_MODE=1)")
        if not answer.ok:
            raise EngineFailure(f"replica {self.name} refused to change its state (status {answer.status})")
        self._silence.restart()

    def _expect_aborts(self) -> None:
        for request in self._requests.values():
            for sequence in request.sequences:
                sequence.expect_abort()

    async def _wake_sleeper(self) -> None:
        """Wake a server that an earlier weft, or somebody else, has put to sleep: the warm-up would wait for ever."""
        answer = await self._http.get("/is_sleeping", self._settings.health_deadline_s)
        if answer.ok and self._http.decode(answer.body, Sleeping).is_sleeping:
            await self.wake_up()

    async def _warm_up(self) -> None:
        # Each kind of request may compile when it is first made.
        warm = GenerateRequest("warm-up", np.array([0, 0]), (None,), max_tokens=2, topk=1)
        scored = replace(warm, scoring=PromptScoring(start=1, logprobs=True, topk=1))
        for request in [warm] if self._settings.head_adapters else [warm, scored]:
            async for _ in self.generate(request):
                pass

    async def _run(self, running: VllmRequest) -> None:
        try:
            # Scored before the pin: what waits for the trainer's forward must hold no adapter's place on the server.
            scored = await self._score_by_trainer(running)
            request = running.request
            async with self._adapters.pin(request.adapter or self._zero, request.turn_taker, request.share) as pin:
                if scored is not None:
                    running.stream.put([scored])
                elif running.request.scoring is not None:
                    await self._score(running, running.request.scoring, pin)
                await self._draw_all(running, pin)
            running.stream.end(None)
        except WeftError as error:
            running.stream.end(error)
        except Exception as error:  # noqa: BLE001 - the task's edge: the reader must get every error
            running.stream.end(as_weft_error(error, "sampling"))

    async def _draw_all(self, running: VllmRequest, pin: Pin) -> None:
        async def draw(sequence: VllmSequence) -> None:
            await self._draw(running, sequence, pin)

        running.is_drawing = True
        tasks = {sequence.start(draw): sequence for sequence in running.sequences if sequence.is_live}
        try:
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                # The task of a sequence that was cut before it was sent is cancelled.
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            for task, sequence in tasks.items():
                if not task.done():
                    # The adapter's folder must stay while the server may still work on the sequence.
                    abandoning = self._background.start(sequence.abandon(self._aborts))
                    self._adapters.prolong(pin, abandoning)

    async def _draw(self, running: VllmRequest, sequence: VllmSequence, pin: Pin) -> None:
        body = running.sequence_body(sequence.index, pin.name, self._settings.base.vocabulary_size)

        async def send() -> None:
            # An id that was never used before: an abort must not end another attempt.
            request_id = f"{running.request.request_id}-{sequence.index}-{uuid4().hex}"
            is_first = sequence.index == 0
            async with self._places.place(running.request, is_first=is_first) as place:
                reservation = await self._reserve(running.request, len(running.request.prompt))
                try:
                    await sequence.draw(self._http, request_id, body, on_first=reservation.release)
                finally:
                    reservation.release()
                    place.drawn = sequence.tokens

        try:
            await send()
        except AdapterLost:
            await self._adapters.load_again(pin)
            await send()

    async def _reserve(self, request: GenerateRequest, tokens: int) -> Reservation:
        return await self._prompts.reserve(tokens, owner=request.turn_taker, share=request.share)

    async def _score(self, running: VllmRequest, scoring: PromptScoring, pin: Pin) -> None:
        """Put the prompt's scores, by the server, into the stream."""

        async def ask(length: int, computed: int, params: dict[str, Any]) -> Drawn:
            return await self._probe(running, running.probe_body(pin.name, length, params), computed, pin)

        probes = PromptProbes(running.request, scoring, ask)
        scored = await self._score_prompt(running, scoring, pin) if scoring.scores_prompt else PromptScored(None, None)
        found = await probes.run(scored)
        # A prompt that the server scores is computed anew; what is drawn after it, or after a probe, has it in the cache.
        cached = 0 if scoring.scores_prompt else probes.cached
        running.stream.put([found] if cached is None else [PromptCached(cached), found])

    async def _probe(self, running: VllmRequest, body: dict[str, Any], computed: int, pin: Pin) -> Drawn:
        """Ask for one token, whose prompt has ``computed`` tokens that the server has not cached."""
        answer = await self._posted(replace(running.request, max_tokens=computed), body, pin, computed)
        return self._http.decode(answer.body, Drawn)

    async def _score_prompt(self, running: VllmRequest, scoring: PromptScoring, pin: Pin) -> PromptScored:
        answer = await self._posted(running.request, running.scoring_body(pin.name, scoring.topk), pin)
        table = self._http.decode(answer.body, ScoredPrompt).prompt_logprobs
        return prompt_scores(running.request.prompt.tolist(), scoring, table)

    async def _posted(
        self, counted: GenerateRequest, body: dict[str, Any], pin: Pin, computed: int | None = None
    ) -> Answer:
        """Send ``body`` once ``counted`` has a place. ``computed``: tokens of the prompt's budget; None takes none.

        Being cancelled ends the wait for a place. What is sent keeps its place and the adapter's folder until it is answered.
        """
        for is_last in (False, True):
            async with AsyncExitStack() as held:
                place = await held.enter_async_context(self._places.place(counted, is_first=computed is None))
                if computed is not None:
                    held.callback((await self._reserve(counted, computed)).release)
                    place.drawn = computed
                sent = self._background.start(self._post(body, held.pop_all()))
            self._adapters.prolong(pin, sent)
            answer = await asyncio.shield(sent)
            if answer.status != 404 or is_last:
                break
            await self._adapters.load_again(pin)
        if not answer.ok:
            raise self._http.refusal(answer)
        return answer

    async def _post(self, body: dict[str, Any], held: AsyncExitStack) -> Answer:
        async with held:
            answer = await self._http.post(GENERATE, body, self._settings.longest_silence_s)
            if answer.ok:
                self._silence.heard()
            return answer

    async def _score_by_trainer(self, running: VllmRequest) -> PromptScored | None:
        """Return the prompt's scores by the trainer's forward, where adapters may change the head; owners take turns.

        vLLM looks up the adapter of a head's logits by sequence. The logits of a scored prompt are by position, so they get
        wrong adapters' heads, or kill the engine of a CPU. More targets and draws than a few come from the forward as well,
        which has all of them in one pass: thousands of probes would hold the server up.
        """
        request, scoring = running.request, running.request.scoring
        if scoring is None or not self._settings.head_adapters:
            return None
        if not scoring.scores_prompt and (self._forward is None or scoring.cells(len(request.prompt)) <= AT_ONCE):
            return None
        if self._forward is None:
            raise InvalidRequest("scoring: this sampler cannot score prompts, because its adapters may change the head")
        running.is_on_server = False
        try:
            async with self._forwards.place(request, is_first=True):
                return await self._forward.score(request.adapter, request.prompt, scoring, request.draws)
        finally:
            running.is_on_server = True
