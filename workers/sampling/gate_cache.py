"""Cache of one base model's closed gates (rows that pause sampling) in one process, read again at every wake-up.

The cache only decides when to look and what to cut. The database decides whether a sample may run
(``tenants.gates.mark_in_flight``).
"""

import asyncio
from collections.abc import Mapping

from contracts.ids import RunId, TenantId
from ledger.runtime import Runtime
from tenants.gates import Gate, GateMode, closed_gates, pool_gate
from tenants.suspensions import Suspension, suspensions


class GateCache:
    """Closed gates by key. Used from one event loop."""

    def __init__(self, runtime: Runtime, base_model: str) -> None:
        self._database = runtime.database
        self._clock = runtime.clock
        self._base_model = base_model
        self._closed: Mapping[str, Gate] = {}
        self._suspended: Mapping[TenantId, Gate] = {}
        self._changed = asyncio.Event()

    async def refresh(self) -> None:
        """Read the closed gates again, and wake ``wait_for_change`` when they differ."""
        async with self._database.read() as session:
            closed = await closed_gates(session, self._base_model, self._clock)
            suspended = {tenant: _gate_of(one) for tenant, one in (await suspensions(session)).items()}
        if (closed, suspended) != (self._closed, self._suspended):
            self._closed, self._suspended = closed, suspended
            self._changed.set()
            self._changed = asyncio.Event()

    def closed_before(self, run: RunId | None, tenant: TenantId | None = None) -> list[Gate]:
        """Return the closed gates before samples of ``run`` (None: of the bare base), the pool's gate first.

        A suspended ``tenant`` counts as a gate of its own, closed with mode ``keep``.
        """
        keys = [pool_gate(self._base_model), *([run] if run is not None else [])]
        gates = [self._closed[key] for key in keys if self.is_closed(key)]
        return gates if tenant is None or tenant not in self._suspended else [*gates, self._suspended[tenant]]

    def is_closed(self, key: str) -> bool:
        """Return whether the gate is closed."""
        gate = self._closed.get(key)
        return gate is not None and (gate.expires_at is None or gate.expires_at > self._clock())

    def next_expiry(self) -> float | None:
        """Return the seconds until the first of the closed gates expires, None when none does."""
        now = self._clock()
        left = [
            (gate.expires_at - now).total_seconds() for gate in self._closed.values() if gate.expires_at is not None
        ]
        return max(0.0, min(left)) if left else None

    async def wait_for_change(self, run: RunId | None, tenant: TenantId | None = None) -> None:
        """Wait until any gate changes or a closed gate before ``run`` expires. Return at once when none is closed."""
        gates = self.closed_before(run, tenant)
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


def _gate_of(suspension: Suspension) -> Gate:
    return Gate(mode=GateMode.KEEP, reason=suspension.reason, since=suspension.since)
