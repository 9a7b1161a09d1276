"""Publication of an adapter's new version in a cluster: every living sampling process loads it before live samplers follow it.

Each process is sent a version command, a row in the database. The reaper deletes the commands of a dead process
(``remove_pools``), so that no sender waits for that process.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from time import monotonic
from uuid import uuid4

from sqlalchemy import delete, insert, select

from contracts.errors import EngineFailure
from contracts.ids import CheckpointId, RunId
from ledger.wakeups import Wakeups, version_command_topic, version_commands_topic
from store.clock import Clock
from store.database import Database, after_commit
from store.repeat import wait_for
from store.tables import VersionCommand, WorkerProcess
from workers.cluster.version_commands import VersionCommandKind
from workers.leases.processes import ProcessKind, database_now

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


class ClusterPublication:
    """A ``Publication`` that reaches every living sampling process."""

    def __init__(self, database: Database, wakeups: Wakeups, clock: Clock, *, patience: timedelta) -> None:
        """``patience`` is how long a process may take to load a version."""
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._patience = patience

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId) -> None:
        """See ``Publication``. Where one process cannot load the version, all drop it."""
        pools = await self._living_pools(base_model)
        commands = await self._send(pools, VersionCommandKind.PREPARE, run, version)
        failures = [failure for failure in await self._outcomes(commands) if failure is not None]
        if failures:
            await self._outcomes(await self._send(pools, VersionCommandKind.WITHDRAW, run, version))
            raise EngineFailure(failures[0])

    async def withdraw(self, version: CheckpointId) -> None:
        """See ``Publication``."""
        commands = await self._send(await self._living_pools(None), VersionCommandKind.WITHDRAW, None, version)
        for failure in await self._outcomes(commands):
            if failure is not None:
                log.warning("version=%s was not forgotten: %s", version, failure)

    async def _living_pools(self, base_model: str | None) -> list[str]:
        """Return the living sampling processes of the base model, or of all base models."""
        async with self._database.read() as session:
            now = await database_now(session, self._clock)
            query = select(WorkerProcess.id).where(
                WorkerProcess.kind == ProcessKind.POOL, WorkerProcess.expires_at > now
            )
            if base_model is not None:
                query = query.where(WorkerProcess.base_model == base_model)
            return list(await session.scalars(query.order_by(WorkerProcess.id)))

    async def _send(
        self, pools: Sequence[str], kind: VersionCommandKind, run: RunId | None, version: CheckpointId
    ) -> list[str]:
        """Send each process a command; return the commands' ids."""
        commands = {pool: str(uuid4()) for pool in pools}
        now = self._clock()
        rows = [
            {"id": command, "process_id": pool, "kind": kind, "run_id": run, "version": version, "created_at": now}
            for pool, command in commands.items()
        ]
        if rows:
            async with self._database.write() as transaction:
                await transaction.execute(insert(VersionCommand), rows)
                for pool in pools:
                    after_commit(transaction, partial(self._wakeups.announce, version_commands_topic(pool)))
        return list(commands.values())

    async def _outcomes(self, commands: Sequence[str]) -> list[str | None]:
        """Wait for the commands and delete them; return why each failed, None where it did not."""
        outcomes = await asyncio.gather(*(self._outcome(command) for command in commands))
        if commands:
            async with self._database.write() as transaction:
                await transaction.execute(delete(VersionCommand).where(VersionCommand.id.in_(commands)))
        return outcomes

    async def _outcome(self, command: str) -> str | None:
        """Wait for one command; return why it failed, None where it did not or its process has died."""
        ends = monotonic() + self._patience.total_seconds()
        with self._wakeups.listen(version_command_topic(command)) as done:
            while monotonic() < ends:
                async with self._database.read() as session:
                    row = (
                        await session.execute(
                            select(VersionCommand.done_at, VersionCommand.error_message, WorkerProcess.expires_at)
                            .join(WorkerProcess, WorkerProcess.id == VersionCommand.process_id, isouter=True)
                            .where(VersionCommand.id == command)
                        )
                    ).one_or_none()
                    now = await database_now(session, self._clock)
                if row is None or row.expires_at is None or row.expires_at <= now:
                    # A dead process that comes back loads the versions that it needs by itself.
                    return None
                if row.done_at is not None:
                    failure: str | None = row.error_message
                    return failure
                await wait_for(done, _LOOK_SECONDS)
        return "a sampling process did not load the version in time"
