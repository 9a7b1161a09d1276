"""Aborts on a vLLM server: those asked for at the same time go in one request."""

import asyncio
from contextlib import suppress

from engine.contracts.errors import EngineFailure
from engine.sampling.background import Background
from engine.sampling.vllm_http import VllmHttp

ABORT = "/inference/v1/abort_requests"
_GATHER_S = 0.02
"""How long an abort that can wait does: what the server is asked to do meanwhile, somebody waits for."""


class VllmAborts:
    """Each answer takes the server time that the tokens of others wait for."""

    def __init__(self, http: VllmHttp, background: Background, deadline_s: float) -> None:
        self._http = http
        self._background = background
        self.deadline_s = deadline_s
        """How long a sequence may take to be confirmed as over."""
        self._ids: list[str] = []
        self._sending: asyncio.Task[None] | None = None
        self._is_urgent = asyncio.Event()

    async def ask(self, server_id: str, *, can_wait: bool = False) -> None:
        """Send the abort; the server ignores ids that it does not know. Raises ``EngineFailure``.

        One that ``can_wait`` goes with the next that cannot, or after ``_GATHER_S``.
        """
        self._ids.append(server_id)
        if self._sending is None:
            self._is_urgent.clear()
            self._sending = self._background.start(self._send())
        if not can_wait:
            self._is_urgent.set()
        sending = self._sending
        await asyncio.wait([sending])
        if sending.cancelled():
            raise EngineFailure("the replica was closed before an abort was sent")
        sending.result()

    async def _send(self) -> None:
        # A turn of the loop: whoever else asks in this one comes along.
        await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GATHER_S):
                await self._is_urgent.wait()
        ids, self._ids, self._sending = self._ids, [], None
        await self._http.post(ABORT, {"request_ids": ids}, self.deadline_s)
