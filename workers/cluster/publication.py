"""Publication of an adapter's new version in a cluster: every living sampling process loads it before live samplers follow it.

Each process is sent a version command, a row in the database. The reaper deletes the commands of a dead process
(``remove_pools``), so that no sender waits for that process.
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from uuid import uuid4

from sqlalchemy import bindparam, delete, insert, select

from contracts.errors import EngineFailure, Unavailable, WeftError
from contracts.ids import CheckpointId, RunId
from ledger.publication import WITHDRAWAL
from ledger.wakeups import Wakeups, version_command_topic, version_commands_topic
from store.batcher import few_lengths
from store.clock import Clock
from store.database import Database
from store.database_clock import database_now
from store.repeat import wait_for
from store.tables import ProcessKind, VersionCommand, WorkerProcess
from workers.cluster.version_commands import VersionCommandKind

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_ASKED_AT_ONCE = 1024

_STATES = (
    select(
        VersionCommand.id,
        VersionCommand.done_at,
        VersionCommand.error_code,
        VersionCommand.error_message,
        WorkerProcess.expires_at,
    )
    .join(WorkerProcess, WorkerProcess.id == VersionCommand.process_id, isouter=True)
    .where(VersionCommand.id.in_(bindparam("ids", expanding=True)))
)


class ClusterPublication:
    """A ``Publication`` that reaches every living sampling process."""

    def __init__(self, database: Database, wakeups: Wakeups, clock: Clock, *, patience: timedelta) -> None:
        """``patience`` is how long a process may take to load a version."""
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._patience = patience

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId) -> None:
        """See ``Publication``. Where one process cannot load the version, all drop it.

        Raises ``Unavailable`` if processes fail only because they cannot read it now, and if this process ends meanwhile.
        """
        pools = await self._living_pools(base_model)
        commands = await self._send(pools, VersionCommandKind.PREPARE, run, [version])
        failures = [failure for failure in await self._outcomes(commands) if failure is not None]
        if failures and not self._wakeups.is_closed:
            await self._outcomes(await self._send(pools, VersionCommandKind.WITHDRAW, run, [version]))
        if failures:
            raise next((failure for failure in failures if not isinstance(failure, Unavailable)), failures[0])

    async def withdraw(self, versions: Sequence[CheckpointId]) -> set[CheckpointId]:
        """See ``Publication``. A process that has not done it in time does it later: its samples draw from the version."""
        pools = await self._living_pools(None)
        commands = await self._send(pools, VersionCommandKind.WITHDRAW, None, versions)
        outcomes = await self._outcomes(commands, patience=min(self._patience, WITHDRAWAL))
        kept: dict[CheckpointId, str] = {}
        for version, failure in zip([version for _ in pools for version in versions], outcomes, strict=True):
            if failure is not None:
                kept[version] = failure.message
        if kept:
            log.warning("%d of %d versions are read still: %s", len(kept), len(versions), next(iter(kept.values())))
        return {version for version in versions if version not in kept}

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
        self,
        pools: Sequence[str],
        kind: VersionCommandKind,
        run: RunId | None,
        versions: Sequence[CheckpointId],
    ) -> list[str]:
        """Send each process a command for each version, with one wake-up; return the commands' ids."""
        now = self._clock()
        rows = [
            {
                "id": str(uuid4()),
                "process_id": pool,
                "kind": kind,
                "run_id": run,
                "version": version,
                "created_at": now,
            }
            for pool in pools
            for version in versions
        ]
        if rows:
            async with self._database.write() as transaction:
                await transaction.execute(insert(VersionCommand), rows)
                for pool in pools:
                    self._wakeups.announce_after_commit(transaction, version_commands_topic(pool))
        return [str(row["id"]) for row in rows]

    async def _outcomes(self, commands: Sequence[str], *, patience: timedelta | None = None) -> list[WeftError | None]:
        """Wait for the commands and delete them; return why each failed, None where it did not or its process has died.

        All of them are asked for with one statement, whenever one is reported or a second has passed. Once this process ends,
        the rest counts as ``Unavailable``.
        """
        outcomes: dict[str, WeftError | None] = {}
        waiting = list(commands)
        ends = monotonic() + (patience or self._patience).total_seconds()
        with self._wakeups.listen(*(version_command_topic(command) for command in commands)) as reported:
            while waiting and monotonic() < ends and not self._wakeups.is_closed:
                outcomes |= await self._reported(waiting)
                waiting = [command for command in waiting if command not in outcomes]
                if waiting:
                    await wait_for(reported, _LOOK_SECONDS)
        late: WeftError = EngineFailure("a sampling process did not load or unload the version in time")
        if self._wakeups.is_closed:
            late = Unavailable("the process that waits for the version ends; send the request again")
        for begin in range(0, len(commands), _ASKED_AT_ONCE):
            async with self._database.write() as transaction:
                some = commands[begin : begin + _ASKED_AT_ONCE]
                await transaction.execute(delete(VersionCommand).where(VersionCommand.id.in_(some)))
        return [outcomes.get(command, late) for command in commands]

    async def _reported(self, commands: Sequence[str]) -> dict[str, WeftError | None]:
        """Return the outcomes of those commands that are done, or that nobody will do any more."""
        waiting: set[str] = set()
        failures: dict[str, WeftError | None] = {}
        async with self._database.read() as session:
            now = await database_now(session, self._clock)
            for begin in range(0, len(commands), _ASKED_AT_ONCE):
                some = few_lengths(commands[begin : begin + _ASKED_AT_ONCE])
                for row in await session.execute(_STATES, {"ids": some}):
                    # A dead process that comes back loads the versions that it needs by itself.
                    is_alive = row.expires_at is not None and row.expires_at > now
                    if row.done_at is not None:
                        failures[row.id] = _failure(row.error_code, row.error_message)
                    elif is_alive:
                        waiting.add(row.id)
        return {command: failures.get(command) for command in commands if command not in waiting}


def _failure(code: str | None, message: str | None) -> WeftError | None:
    """Return the error that a command's row tells, None for none."""
    if message is None:
        return None
    return Unavailable(message) if code == Unavailable.code else EngineFailure(message)
