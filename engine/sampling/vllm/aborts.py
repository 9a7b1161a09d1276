"""Sends aborts of sequences to a vLLM server; all aborts of one millisecond go into one HTTP request."""

import asyncio

from contracts.errors import EngineFailure
from engine.sampling.background_tasks import BackgroundTasks
from engine.sampling.vllm.http import VllmHttp

ABORT = "/inference/v1/abort_requests"
_GATHER_S = 0.001
"""Seconds to gather aborts. Requests that replace the aborted sequences are sent first, because clients wait for them."""


class VllmAborts:
    """Sender of aborts to one server. It gathers aborts, because each HTTP request to the server delays other tokens."""

    def __init__(self, http: VllmHttp, background: BackgroundTasks, deadline_s: float) -> None:
        self._http = http
        self._background = background
        self.deadline_s = deadline_s
        """Seconds within which the server must confirm that an aborted sequence has ended."""
        self._ids: list[str] = []
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, server_id: str) -> None:
        """Abort the request ``server_id``; the server ignores ids that it does not know. Raises ``EngineFailure``."""
        self._ids.append(server_id)
        if self._sending is None:
            self._sending = self._background.start(self._send())
        sending = self._sending
        await asyncio.wait([sending])
        if sending.cancelled():
            raise EngineFailure("the replica was closed before an abort was sent")
        sending.result()

    async def _send(self) -> None:
        await asyncio.sleep(_GATHER_S)
        ids, self._ids, self._sending = self._ids, [], None
        await self._http.post(ABORT, {"request_ids": ids}, self.deadline_s)
