"""The gates of one base model as one process knows them: a picture of the database's, taken again at every wake-up.

The picture only decides when to look and what to cut. Whether a sample may run is decided in the database
(``tenants.gates.mark_in_flight``).
"""

import asyncio
from collections.abc import Mapping

from contracts.ids import RunId
from store.clock import Clock
from store.database import Database
from tenants.gates import Gate, closed_gates, pool_gate


class GateCache:
    """Closed gates by key. Used from one event loop."""

    def __init__(self, base_model: str, database: Database, clock: Clock) -> None:
        self._base_model = base_model
        self._database = database
        self._clock = clock
        self._closed: Mapping[str, Gate] = {}
        self._changed = asyncio.Event()

    async def refresh(self) -> None:
        """Take the picture again."""
        async with self._database.read() as session:
            closed = await closed_gates(session, self._base_model, self._clock)
        if closed != self._closed:
            self._closed = closed
            self._changed.set()
            self._changed = asyncio.Event()

    def before(self, run: RunId | None) -> list[Gate]:
        """The closed gates before samples of ``run`` (None: of the bare base), the pool's first; empty when all are open."""
        keys = [pool_gate(self._base_model), *([run] if run is not None else [])]
        now = self._clock()
        gates = [self._closed[key] for key in keys if key in self._closed]
        return [gate for gate in gates if gate.expires_at is None or gate.expires_at > now]

    async def wait_for_change(self, run: RunId | None) -> None:
        """Wait until the picture changes or a gate before ``run`` expires."""
        gates = self.before(run)
        if not gates:
            return
        now = self._clock()
        left = [(gate.expires_at - now).total_seconds() for gate in gates if gate.expires_at is not None]
        seconds = max(min(left), 0.0) if left else None
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            await self.refresh()
