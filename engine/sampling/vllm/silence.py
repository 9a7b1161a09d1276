"""Watch over the silence of a vLLM server: notices an engine that hangs, and a stream that is lost while others are drawn.

The server's front answers ``/health``, confirms aborts and takes requests while its engine hangs. So only tokens, and answers
that took some, count as signs of the engine.
"""

import asyncio
from collections.abc import Mapping
from time import monotonic

from contracts.errors import EngineFailure
from engine.sampling.vllm.aborts import VllmAborts
from engine.sampling.vllm.http import VllmHttp
from engine.sampling.vllm.messages import Paused
from engine.sampling.vllm.request import VllmRequest
from engine.sampling.vllm.sequence import VllmSequence
from engine.sampling.vllm.settings import VllmReplicaSettings


class SilenceWatch:
    """Watch over one server and the ``requests`` on it. Used from one event loop."""

    def __init__(
        self, http: VllmHttp, settings: VllmReplicaSettings, requests: Mapping[str, VllmRequest], aborts: VllmAborts
    ) -> None:
        self._http = http
        self._settings = settings
        self._requests = requests
        self._aborts = aborts
        self._heard_at = monotonic()
        self.hangs = False
        """True once the server has been silent for too long, until it draws a token."""

    def heard(self) -> None:
        """Note that the engine works."""
        self.hangs = False
        self.restart()

    def restart(self) -> None:
        """Count the server's silence from now on."""
        self._heard_at = monotonic()

    async def run(self, closing: asyncio.Event) -> None:
        """Look at the server until ``closing``."""
        while not closing.is_set():
            await self._look()
            try:
                async with asyncio.timeout(self._settings.probe_every_s):
                    await closing.wait()
            except TimeoutError:
                continue

    async def answers(self) -> bool:
        """Return whether the server's front answers."""
        try:
            return (await self._http.get("/health", self._settings.health_deadline_s)).ok
        except EngineFailure:
            return False

    def fail_all(self, failure: EngineFailure) -> None:
        """Fail every outstanding request."""
        for request in self._requests.values():
            request.stream.end(failure)
            if request.task is not None:
                request.task.cancel()

    async def _look(self) -> None:
        if not any(request.is_on_server for request in self._requests.values()):
            self.restart()
        if monotonic() - self._heard_at >= self._settings.probe_every_s:
            if not await self.answers():
                self.fail_all(EngineFailure(f"replica {self._settings.name} does not answer any more"))
            elif await self._is_paused():
                # The time an operator's pause takes is not silence, also when it ended just before the next look.
                self.restart()
                for _, sequence in self._sent():
                    sequence.heard_at = monotonic()
            elif monotonic() - self._heard_at >= self._settings.longest_silence_s:
                self.hangs = True
                self.fail_all(EngineFailure(f"replica {self._settings.name} makes no tokens any more"))
        await self._fail_lost()

    async def _fail_lost(self) -> None:
        """Fail the sequences that have been silent for too long and do not wait in the server's own queue.

        The server begins the oldest one first, unless all places for adapters in a batch are taken by others.
        """
        lost: list[VllmSequence] = []
        sent, now = self._sent(), monotonic()
        drawn = {adapter for adapter, sequence in sent if sequence.has_begun}
        for place, (adapter, sequence) in enumerate(sent):
            has_turn = place == 0 and (adapter in drawn or len(drawn) < self._settings.max_loras)
            if not (sequence.has_begun or has_turn):
                sequence.heard_at = now
            elif now - sequence.heard_at >= self._settings.longest_silence_s:
                lost.append(sequence)
        failure = EngineFailure(f"replica {self._settings.name} makes no tokens of a sequence any more")
        await asyncio.gather(*(sequence.lose(self._aborts, failure) for sequence in lost))

    def _sent(self) -> list[tuple[str, VllmSequence]]:
        """Return the sequences on the server with their adapters' names, the oldest first."""
        sent = [
            ("" if request.request.adapter is None else request.request.adapter.name, sequence)
            for request in self._requests.values()
            for sequence in request.sequences
            if sequence.is_sent and sequence.is_live
        ]
        return sorted(sent, key=lambda one: one[1].sent_at)

    async def _is_paused(self) -> bool:
        try:
            answer = await self._http.get("/is_paused", self._settings.health_deadline_s)
            return answer.ok and self._http.decode(answer.body, Paused).is_paused
        except EngineFailure:
            return False
