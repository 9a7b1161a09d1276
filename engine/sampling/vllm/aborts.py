"""Aborts on a vLLM server: those asked for at the same time go in one request."""

import asyncio

from contracts.errors import EngineFailure
from engine.sampling.background_tasks import Background
from engine.sampling.vllm.http import VllmHttp

ABORT = "/inference/v1/abort_requests"
_GATHER_S = 0.001
"""What takes the place of sequences that are left is sent meanwhile: it is what somebody waits for."""


class VllmAborts:
    """Each answer takes the server time that the tokens of others wait for."""

    def __init__(self, http: VllmHttp, background: Background, deadline_s: float) -> None:
        self._http = http
        self._background = background
        self.deadline_s = deadline_s
        """How long a sequence may take to be confirmed as over."""
        self._ids: list[str] = []
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, server_id: str) -> None:
        """Send the abort; the server ignores ids that it does not know. Raises ``EngineFailure``."""
        self._ids.append(server_id)
        if self._sending is None:
            self._sending = self._background.start(self._send())
        sending = self._sending
        await asyncio.wait([sending])
        if sending.cancelled():
            raise EngineFailure("the replica was closed before an abort was sent")
        sending.result()

    async def _send(self) -> None:
        # Whoever else asks meanwhile comes along.
        await asyncio.sleep(_GATHER_S)
        ids, self._ids, self._sending = self._ids, [], None
        await self._http.post(ABORT, {"request_ids": ids}, self.deadline_s)
