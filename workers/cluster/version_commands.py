"""Runs the version commands that a sampling process gets: load an adapter's version on its replicas, or drop one.

``workers/cluster/publication.py`` sends the commands.
"""

import asyncio
import logging
from enum import StrEnum
from functools import partial

from sqlalchemy import select, update

from contracts.errors import Unavailable, WeftError
from contracts.ids import CheckpointId, RunId
from ledger.publication import Prepare, Withdraw
from ledger.runtime import Runtime
from ledger.wakeups import version_command_topic, version_commands_topic
from store.database import after_commit
from store.repeat import repeat
from store.tables import VersionCommand

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 5.0


class VersionCommandKind(StrEnum):
    """``prepare``: load the version beside the others. ``withdraw``: drop it from every replica."""

    PREPARE = "prepare"
    WITHDRAW = "withdraw"


class VersionCommandRunner:
    """Runs the version commands of one sampling process, each in a task of its own."""

    def __init__(self, process: str, prepare: Prepare, withdraw: Withdraw, runtime: Runtime) -> None:
        self._process = process
        self._prepare = prepare
        self._withdraw = withdraw
        self._runtime = runtime
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Run commands until cancelled."""
        with self._runtime.wakeups.listen(version_commands_topic(self._process)) as sent:
            failed = "version commands could not be begun"
            await repeat(self._begin, seconds=_SWEEP_SECONDS, wake=sent, failed=failed)

    async def _begin(self) -> None:
        """Begin every command of the process that is not done and not running."""
        try:
            async with self._runtime.database.read() as session:
                mine = VersionCommand.process_id == self._process
                found = await session.scalars(select(VersionCommand).where(mine, VersionCommand.done_at.is_(None)))
                commands = list(found)
        except Unavailable as outage:
            log.warning("version commands cannot be read: %s", outage.message)
            return
        for command in commands:
            if command.id not in self._running:
                task = asyncio.create_task(self._run_one(command), name=f"version command {command.id}")
                self._running[command.id] = task
                task.add_done_callback(partial(self._ended, command.id))

    def _ended(self, command: str, _task: "asyncio.Task[None]") -> None:
        del self._running[command]

    async def _run_one(self, command: VersionCommand) -> None:
        failure: str | None = None
        version = CheckpointId(command.version)
        try:
            match command.kind:
                case VersionCommandKind.WITHDRAW:
                    await self._withdraw(version)
                case VersionCommandKind.PREPARE:
                    await self._prepare(RunId(command.run_id or ""), version)
                case _:
                    failure = f"this version of weft does not know the command {command.kind[:20]!r}"
        except WeftError as error:
            failure = error.message
        except Exception:
            log.exception("version=%s could not be loaded", version)
            failure = "the version could not be loaded; the service's log has the cause"
        try:
            async with self._runtime.database.write() as transaction:
                await transaction.execute(
                    update(VersionCommand)
                    .where(VersionCommand.id == command.id)
                    .values(done_at=self._runtime.clock(), error_message=failure)
                )
                done = partial(self._runtime.wakeups.announce, version_command_topic(command.id))
                after_commit(transaction, done)
        except Unavailable as outage:
            # The command stays open. A later look runs it again.
            log.warning("version command %s could not be recorded: %s", command.id, outage.message)
