"""The heartbeat loop of an API process: renews the process's lease and reaps dead API processes. Operators see them by it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from contracts.errors import Unavailable
from ledger.runtime import Runtime
from store.repeat import repeat
from store.tables import ProcessKind
from workers.leases.heartbeat import Heartbeat
from workers.leases.processes import new_identity, remove_processes
from workers.leases.reaper import reap_peers


class ApiHeartbeat:
    """One API process's heartbeat loop. The process answers clients with a lease or without."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._heartbeat = Heartbeat(new_identity(ProcessKind.API), runtime)

    async def run(self) -> None:
        """Renew and reap until cancelled; once only, where there is no other process."""
        failed = f"no heartbeat of {self._heartbeat.identity.id} could be given"
        await repeat(self.look, seconds=self._pause, failed=failed)

    def _pause(self) -> float | None:
        is_done = self._heartbeat.is_alone and not self._heartbeat.is_due
        return None if is_done else self._heartbeat.renewal_seconds

    async def look(self) -> None:
        """Renew the lease, and reap dead API processes. Raises ``Unavailable``."""
        await self._heartbeat.renew()
        await reap_peers(self._runtime, self._heartbeat)

    async def leave(self) -> None:
        """Remove this process at an orderly end. Without a database it counts as dead once its lease has ended."""
        with suppress(Unavailable):
            async with self._runtime.database.write() as transaction:
                await remove_processes(transaction, [self._heartbeat.identity.id])


@asynccontextmanager
async def told_while_alive(runtime: Runtime) -> AsyncIterator[None]:
    """Have this API process's row stand for the block, and remove it afterwards."""
    heartbeat = ApiHeartbeat(runtime)
    beating = asyncio.create_task(heartbeat.run(), name="heartbeat")
    try:
        yield
    finally:
        beating.cancel()
        # A renewal under way would write the row again.
        await asyncio.gather(beating, return_exceptions=True)
        await heartbeat.leave()
