"""A sampling process among others: it lives as long as it renews its row; what it had taken is free again once it is dead."""

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from sqlalchemy import delete, update
from sqlalchemy.ext.asyncio import AsyncSession

from ledger.statements import IS_PENDING, IS_SAMPLE
from ledger.wakeups import Wakeups, cleared_samples_topic, sampling_topic
from store.clock import Clock
from store.database import Database, after_commit
from store.tables import Operation, VersionCommand
from telemetry.readiness import NotReady
from tenants.gates import clear_all_in_flight
from workers.leases.processes import Heartbeat, ProcessKind, WorkerIdentity, forget, hold_dead

log = logging.getLogger(__name__)


class PoolHeartbeat:
    """One sampling process's sign of life."""

    def __init__(
        self, identity: WorkerIdentity, *, database: Database, wakeups: Wakeups, clock: Clock, lease: timedelta
    ) -> None:
        """``lease`` is how long others wait for a sign of life before they take over."""
        self.identity = identity
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._heartbeat = Heartbeat(identity, database=database, clock=clock, lease=lease)
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Renew, and free what the dead had taken, until ``stop``; where there is no other process, once."""
        while not self._ending.is_set():
            try:
                await self.look()
            except Exception:
                log.exception("no sign of life of %s could be given; trying again", self.identity.id)
            try:
                async with asyncio.timeout(None if self._heartbeat.is_alone else self._heartbeat.renewal_seconds):
                    await self._ending.wait()
            except TimeoutError:
                continue

    def stop(self) -> None:
        """End ``run``; what was taken stays so until ``leave``, or until the lease ends."""
        self._ending.set()

    async def look(self) -> None:
        """Renew, and free what the dead had taken."""
        await self._heartbeat.renew()
        async with self._database.write() as transaction:
            kind, base_model, known_only = ProcessKind.POOL, self.identity.base_model, not self._heartbeat.may_judge
            dead = await hold_dead(transaction, kind, base_model, self._clock, known_only=known_only)
            await reap_pools(transaction, dead, base_model, self._wakeups)

    async def check(self) -> None:
        """Others know that this process lives. Raises ``NotReady``."""
        if not self._heartbeat.is_given:
            raise NotReady("this sampling process cannot renew its lease")

    async def leave(self) -> None:
        """Free what this process had taken, in an orderly end."""
        async with self._database.write() as transaction:
            await _free(transaction, [self.identity.id], self.identity.base_model, self._wakeups)


async def reap_pools(transaction: AsyncSession, dead: Sequence[str], base_model: str, wakeups: Wakeups) -> None:
    """Free what dead sampling processes of a base model had taken, whose rows the caller holds, and remove these."""
    if dead:
        log.warning("sampling processes %s are dead; their samples go to others", ", ".join(dead))
        await _free(transaction, dead, base_model, wakeups)


async def _free(transaction: AsyncSession, processes: Sequence[str], base_model: str, wakeups: Wakeups) -> None:
    await transaction.execute(
        update(Operation)
        .where(
            IS_PENDING,
            IS_SAMPLE,
            Operation.taken_by.in_(processes),
        )
        .values(taken_by=None)
        .execution_options(synchronize_session=False)
    )
    for process in processes:
        await clear_all_in_flight(transaction, process)
    await transaction.execute(delete(VersionCommand).where(VersionCommand.process_id.in_(processes)))
    await forget(transaction, processes)
    for topic in (sampling_topic(base_model), cleared_samples_topic(base_model)):
        after_commit(transaction, partial(wakeups.announce, topic))
