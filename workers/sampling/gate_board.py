"""The gates of one base model as one process knows them: a picture of the database's, taken again at every wake-up.

The picture only decides when to look and what to cut. Whether a sample may run is decided in the database
(``tenants.gates.enter``).
"""

import asyncio
from collections.abc import Mapping

from engine.contracts.ids import RunId
from tenants.clock import Clock
from tenants.database import Database
from tenants.gates import Gate, closed_gates, pool_gate


class GateBoard:
    """Closed gates by key. Used from one event loop."""

    def __init__(self, base_model: str, database: Database, clock: Clock) -> None:
        self._base_model = base_model
        self._database = database
        self._clock = clock
        self._closed: Mapping[str, Gate] = {}
        self._changed = asyncio.Event()

    async def refresh(self) -> dict[str, Gate]:
        """Take the picture again; returns the gates that are closed and were not, or not like that."""
        async with self._database.read() as session:
            closed = await closed_gates(session, self._base_model, self._clock)
        new = {key: gate for key, gate in closed.items() if gate != self._closed.get(key)}
        if closed != self._closed:
            self._closed = closed
            self._changed.set()
            self._changed = asyncio.Event()
        return new

    def before(self, run: RunId | None) -> Gate | None:
        """The closed gate before samples of ``run`` (None: of the bare base), the pool's first; None when all are open."""
        keys = [pool_gate(self._base_model), *([run] if run is not None else [])]
        now = self._clock()
        for key in keys:
            gate = self._closed.get(key)
            if gate is not None and (gate.expires_at is None or gate.expires_at > now):
                return gate
        return None

    async def wait_for_change(self, run: RunId | None) -> None:
        """Wait until the picture changes or a gate before ``run`` expires."""
        gate = self.before(run)
        if gate is None:
            return
        seconds = None if gate.expires_at is None else (gate.expires_at - self._clock()).total_seconds()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            await self.refresh()
