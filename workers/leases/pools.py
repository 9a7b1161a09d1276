"""The heartbeat loop of a sampling process: renews the process's lease and reaps dead sampling processes."""

import asyncio
from collections.abc import Sequence

from contracts.ids import RequestId, TenantId
from ledger.runtime import Runtime
from store.repeat import repeat
from store.tables import PoolState
from telemetry.readiness import NotReady
from tenants.sample_progress import mark_unsaved
from tenants.worker_standings import ToldReplica
from workers.leases.base_weights import WeightsCheck
from workers.leases.heartbeat import Heartbeat
from workers.leases.processes import WorkerIdentity, tell_pool
from workers.leases.reaper import reap_peers, reap_pools, remove_pools


class PoolHeartbeat:
    """One sampling process's heartbeat loop."""

    def __init__(self, identity: WorkerIdentity, runtime: Runtime, weights: WeightsCheck | None = None) -> None:
        """A process whose ``weights`` are not accepted gets no samples."""
        self._weights = weights
        self.identity = identity
        self._runtime = runtime
        self._heartbeat = Heartbeat(identity, runtime)
        self._stopping = asyncio.Event()
        self.has_looked = asyncio.Event()
        """Set once the dead were looked for: from then on the samples' rows tell at which ones a process has died.

        Not set while this process has other weights than those that the base model's name stands for.
        """

    async def run(self) -> None:
        """Renew and reap until ``stop``; once only, where there is no other process."""
        await repeat(
            self.look,
            seconds=self._pause,
            stopping=self._stopping,
            failed=f"no heartbeat of {self.identity.id} could be given",
        )

    def _pause(self) -> float | None:
        return None if self._heartbeat.is_alone and self.has_looked.is_set() else self._heartbeat.renewal_seconds

    @property
    def may_draw(self) -> bool:
        """False once other processes may soon count this one as dead and draw its samples."""
        return self._heartbeat.is_sure

    @property
    def held_since(self) -> float:
        """Monotonic time since which the lease has not lapsed. A process whose lease had lapsed may have lost its row."""
        return self._heartbeat.held_since

    def stop(self) -> None:
        """End ``run``. The process keeps its samples until ``leave``, or until its lease ends."""
        self._stopping.set()

    async def look(self) -> None:
        """Renew the lease, and reap dead sampling processes of the base model. Raises ``Unavailable``."""
        if self._weights is not None and not await self._weights.are_accepted():
            self.has_looked.clear()
            return
        await self._heartbeat.renew()
        await reap_peers(self._runtime, self._heartbeat)
        self.has_looked.set()

    async def tell(self, state: PoolState, replicas: Sequence[ToldReplica]) -> bool:
        """Record whether this process takes samples, and its replicas.

        Return False while it has no lease yet. Raises ``Unavailable``.
        """
        async with self._runtime.database.write() as transaction:
            return await tell_pool(transaction, self.identity, state, replicas)

    async def check(self) -> None:
        """Raise ``NotReady`` when the weights are not accepted, or the lease has ended."""
        if self._weights is not None:
            self._weights.check()
        if not self._heartbeat.has_lease:
            raise NotReady("this sampling process cannot renew its lease")

    async def give_up(self) -> None:
        """Return the samples of a process that cannot draw any more. Those in flight count as those of a dead process."""
        self.stop()
        async with self._runtime.database.write() as transaction:
            await reap_pools(transaction, [self.identity.id], self.identity.base_model, self._runtime)

    async def leave(self, unsaved: Sequence[tuple[TenantId, RequestId]] = ()) -> None:
        """Remove this process at an orderly end and return its samples, so that others need not wait for its lease to end.

        ``unsaved``: samples whose tokens could not be saved. Raises ``Unavailable``; the process then counts as a dead one.
        """
        async with self._runtime.database.write() as transaction:
            await mark_unsaved(transaction, unsaved)
            await remove_pools(transaction, [self.identity.id], self.identity.base_model, self._runtime)
