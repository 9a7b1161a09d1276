"""Getting versions onto the replicas of sampling processes, and off: orders in the database, a row a process.

A process that dies has its orders deleted with the rest of what it had (``reap_pools``): nobody waits for it.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from functools import partial
from time import monotonic
from uuid import uuid4

from sqlalchemy import delete, insert, select, update

from contracts.errors import EngineFailure, Unavailable, WeftError
from contracts.ids import CheckpointId, RunId
from ledger.publication import Prepare, Withdraw
from ledger.wakeups import Wakeups, version_command_topic, version_commands_topic
from store.clock import Clock
from store.database import Database, after_commit
from store.repeat import wait_for
from store.tables import VersionCommand, WorkerProcess
from workers.leases.processes import ProcessKind, database_now

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_SWEEP_SECONDS = 5.0


class _Kind(StrEnum):
    PREPARE = "prepare"
    WITHDRAW = "withdraw"


class ClusterPublication:
    """A ``Publication`` that reaches every living sampling process."""

    def __init__(self, database: Database, wakeups: Wakeups, clock: Clock, *, patience: timedelta) -> None:
        """``patience`` is how long a process may take to load a version."""
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._patience = patience

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId) -> None:
        """See ``Publication``: where one process could not load it, all forget it."""
        pools = await self._pools(base_model)
        orders = await self._order(pools, _Kind.PREPARE, run, version)
        failures = [failure for failure in await self._ends(orders) if failure is not None]
        if failures:
            await self._ends(await self._order(pools, _Kind.WITHDRAW, run, version))
            raise EngineFailure(failures[0])

    async def withdraw(self, version: CheckpointId) -> None:
        """See ``Publication``."""
        orders = await self._order(await self._pools(None), _Kind.WITHDRAW, None, version)
        for failure in await self._ends(orders):
            if failure is not None:
                log.warning("version=%s was not forgotten: %s", version, failure)

    async def _pools(self, base_model: str | None) -> list[str]:
        async with self._database.read() as session:
            now = await database_now(session, self._clock)
            query = select(WorkerProcess.id).where(
                WorkerProcess.kind == ProcessKind.POOL, WorkerProcess.expires_at > now
            )
            if base_model is not None:
                query = query.where(WorkerProcess.base_model == base_model)
            return list(await session.scalars(query.order_by(WorkerProcess.id)))

    async def _order(
        self, pools: Sequence[str], kind: _Kind, run: RunId | None, version: CheckpointId
    ) -> dict[str, str]:
        """Ask every one of the processes; returns the orders' ids by process."""
        orders = {pool: str(uuid4()) for pool in pools}
        now = self._clock()
        rows = [
            {"id": order, "process_id": pool, "kind": kind, "run_id": run, "version": version, "created_at": now}
            for pool, order in orders.items()
        ]
        if rows:
            async with self._database.write() as transaction:
                await transaction.execute(insert(VersionCommand), rows)
                for pool in pools:
                    after_commit(transaction, partial(self._wakeups.announce, version_commands_topic(pool)))
        return orders

    async def _ends(self, orders: dict[str, str]) -> list[str | None]:
        """Why each could not be carried out, None where it was, or where the process has died."""
        ends = await asyncio.gather(*(self._end(order) for order in orders.values()))
        if orders:
            async with self._database.write() as transaction:
                await transaction.execute(delete(VersionCommand).where(VersionCommand.id.in_(orders.values())))
        return ends

    async def _end(self, order: str) -> str | None:
        ends = monotonic() + self._patience.total_seconds()
        with self._wakeups.listen(version_command_topic(order)) as event:
            while monotonic() < ends:
                async with self._database.read() as session:
                    row = (
                        await session.execute(
                            select(VersionCommand.done_at, VersionCommand.error_message, WorkerProcess.expires_at)
                            .join(WorkerProcess, WorkerProcess.id == VersionCommand.process_id, isouter=True)
                            .where(VersionCommand.id == order)
                        )
                    ).one_or_none()
                    now = await database_now(session, self._clock)
                if row is None or row.expires_at is None or row.expires_at <= now:
                    # Dead, or as good as dead: it loads what it needs when it comes back.
                    return None
                if row.done_at is not None:
                    failure: str | None = row.error_message
                    return failure
                await wait_for(event, _LOOK_SECONDS)
        return "a sampling process did not load the version in time"


class VersionCommandRunner:
    """Carries out what one sampling process is asked."""

    def __init__(
        self,
        process: str,
        prepare: Prepare,
        withdraw: Withdraw,
        *,
        database: Database,
        wakeups: Wakeups,
        clock: Clock,
    ) -> None:
        self._process = process
        self._prepare = prepare
        self._withdraw = withdraw
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        with self._wakeups.listen(version_commands_topic(self._process)) as event:
            while True:
                event.clear()
                try:
                    await self._begin()
                except Unavailable as outage:
                    log.warning("orders cannot be read: %s", outage.message)
                await wait_for(event, _SWEEP_SECONDS)

    async def _begin(self) -> None:
        async with self._database.read() as session:
            orders = await session.scalars(
                select(VersionCommand).where(
                    VersionCommand.process_id == self._process, VersionCommand.done_at.is_(None)
                )
            )
            for order in orders:
                if order.id not in self._under_way:
                    task = asyncio.create_task(self._carry_out(order), name=f"order {order.id}")
                    self._under_way[order.id] = task
                    task.add_done_callback(partial(self._ended, order.id))

    def _ended(self, order: str, _task: "asyncio.Task[None]") -> None:
        del self._under_way[order]

    async def _carry_out(self, order: VersionCommand) -> None:
        failure: str | None = None
        version = CheckpointId(order.version)
        try:
            if order.kind == _Kind.WITHDRAW:
                await self._withdraw(version)
            else:
                await self._prepare(RunId(order.run_id or ""), version)
        except WeftError as error:
            failure = error.message
        except Exception:
            log.exception("version=%s could not be loaded", version)
            failure = "the version could not be loaded; the service's log has the cause"
        try:
            async with self._database.write() as transaction:
                await transaction.execute(
                    update(VersionCommand)
                    .where(VersionCommand.id == order.id)
                    .values(done_at=self._clock(), error_message=failure)
                )
                after_commit(transaction, partial(self._wakeups.announce, version_command_topic(order.id)))
        except Unavailable as outage:
            # Still open: it is carried out again.
            log.warning("order=%s could not be recorded: %s", order.id, outage.message)
