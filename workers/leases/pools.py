"""The heartbeat loop of a sampling process: renews the process's lease and reaps dead sampling processes."""

import asyncio

from ledger.runtime import Runtime
from store.repeat import repeat
from store.tables import PoolState
from telemetry.readiness import NotReady
from workers.leases.heartbeat import Heartbeat
from workers.leases.processes import WorkerIdentity, tell_pool_state
from workers.leases.reaper import reap_peers, remove_pools


class PoolHeartbeat:
    """One sampling process's heartbeat loop."""

    def __init__(self, identity: WorkerIdentity, runtime: Runtime) -> None:
        self.identity = identity
        self._runtime = runtime
        self._heartbeat = Heartbeat(identity, runtime)
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Renew and reap until ``stop``; once only, where there is no other process."""
        await repeat(
            self.look,
            seconds=lambda: None if self._heartbeat.is_alone else self._heartbeat.renewal_seconds,
            stopping=self._stopping,
            failed=f"no heartbeat of {self.identity.id} could be given",
        )

    def stop(self) -> None:
        """End ``run``. The process keeps its samples until ``leave``, or until its lease ends."""
        self._stopping.set()

    async def look(self) -> None:
        """Renew the lease, and reap dead sampling processes of the base model. Raises ``Unavailable``."""
        await self._heartbeat.renew()
        await reap_peers(self._runtime, self._heartbeat)

    async def tell(self, state: PoolState) -> bool:
        """Record whether this process takes samples. Return False while it has no lease yet. Raises ``Unavailable``."""
        async with self._runtime.database.write() as transaction:
            return await tell_pool_state(transaction, self.identity, state)

    async def check(self) -> None:
        """Raise ``NotReady`` when the lease has ended."""
        if not self._heartbeat.has_lease:
            raise NotReady("this sampling process cannot renew its lease")

    async def leave(self) -> None:
        """Remove this process at an orderly end and return its samples, so that others need not wait for its lease to end."""
        async with self._runtime.database.write() as transaction:
            await remove_pools(transaction, [self.identity.id], self.identity.base_model, self._runtime)
