"""Runs the version commands that a sampling process gets: load an adapter's version on its replicas, or drop one.

``workers/cluster/publication.py`` sends the commands. Tenants take turns: the oldest command of each is begun before the
second of any, and a tenant has few loads at a time, because the places of a replica are first come, first served.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from sqlalchemy import case, func, select, update

from contracts.errors import Unavailable, WeftError
from contracts.ids import CheckpointId, RunId
from ledger.publication import Prepare, Withdraw
from ledger.runtime import Runtime
from ledger.wakeups import version_command_topic, version_commands_topic
from store.batcher import Batcher, few_lengths
from store.database import after_commit
from store.repeat import repeat
from store.tables import Run, VersionCommand

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 5.0
_AT_ONCE = 256
"""Most commands that are begun by one look; the next one finds the others."""
_LOADS_OF_TENANT = 8
"""Most versions of one tenant that a process loads at a time."""


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
        self._look = asyncio.Event()
        """Set when a command was sent, and when one has ended, which may leave its turn to another."""
        self._withdrawn: Batcher[tuple[str, str | None], None] = Batcher(self._record_withdrawn)

    async def run(self) -> None:
        """Run commands until cancelled."""
        with self._runtime.wakeups.listen(version_commands_topic(self._process), event=self._look):
            failed = "version commands could not be begun"
            await repeat(self._begin, seconds=_SWEEP_SECONDS, wake=self._look, failed=failed)

    async def _begin(self) -> None:
        """Begin the next commands of the process that are not done and not running."""
        try:
            new = await self._next()
        except Unavailable as outage:
            log.warning("version commands cannot be read: %s", outage.message)
            return
        withdrawn = [command for command in new if command.kind == VersionCommandKind.WITHDRAW]
        if withdrawn:
            self._start(withdrawn, self._withdraw_all(withdrawn))
        for command in new:
            if command.kind != VersionCommandKind.WITHDRAW:
                self._start([command], self._run_prepare(command))

    async def _next(self) -> list[VersionCommand]:
        """Return the commands to begin: of all that are open the oldest of each tenant first, without those that run.

        The running ones count among their tenant's first, which bounds its loads.
        """
        is_withdrawal = VersionCommand.kind == VersionCommandKind.WITHDRAW
        turn = func.row_number().over(
            partition_by=(Run.tenant_id, VersionCommand.kind), order_by=(VersionCommand.created_at, VersionCommand.id)
        )
        mine = VersionCommand.process_id == self._process
        turns = (
            select(VersionCommand.id, turn.label("turn"))
            # A withdrawal by housekeeping names no run.
            .join(Run, Run.id == VersionCommand.run_id, isouter=True)
            .where(mine, VersionCommand.done_at.is_(None))
            .subquery()
        )
        query = (
            select(VersionCommand)
            .join(turns, turns.c.id == VersionCommand.id)
            .where(turns.c.turn <= case((is_withdrawal, _AT_ONCE), else_=_LOADS_OF_TENANT))
            .where(VersionCommand.id.not_in(few_lengths(list(self._running))))
            .order_by(turns.c.turn, VersionCommand.created_at, VersionCommand.id)
            .limit(_AT_ONCE)
        )
        async with self._runtime.database.read() as session:
            return list(await session.scalars(query))

    def _start(self, commands: Sequence[VersionCommand], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"version commands {commands[0].id}")
        ids = [command.id for command in commands]
        self._running.update(dict.fromkeys(ids, task))
        task.add_done_callback(partial(self._ended, ids))

    def _ended(self, commands: Sequence[str], _task: "asyncio.Task[None]") -> None:
        for command in commands:
            del self._running[command]

    async def _withdraw_all(self, commands: Sequence[VersionCommand]) -> None:
        """Drop the commands' versions, many at once. Those that end at one moment are recorded with one statement."""
        await asyncio.gather(*(self._run_withdraw(command) for command in commands))

    async def _run_withdraw(self, command: VersionCommand) -> None:
        """Drop one version. A version that cannot be dropped, or not yet, holds up no other."""
        failure: str | None = None
        try:
            await self._withdraw(CheckpointId(command.version))
        except WeftError as error:
            failure = error.message
        await self._withdrawn.ask((command.id, failure))

    async def _record_withdrawn(self, ended: Sequence[tuple[str, str | None]]) -> list[None]:
        for failure in {failure for _, failure in ended}:
            await self._record([command for command, why in ended if why == failure], failure)
        return [None] * len(ended)

    async def _run_prepare(self, command: VersionCommand) -> None:
        failure: str | None = None
        version = CheckpointId(command.version)
        try:
            await self._prepare(RunId(command.run_id or ""), version)
        except WeftError as error:
            failure = error.message
        except Exception:
            log.exception("version=%s could not be loaded", version)
            failure = "the version could not be loaded; the service's log has the cause"
        await self._record([command.id], failure)

    async def _record(self, commands: Sequence[str], failure: str | None) -> None:
        """Record the commands as carried out. One wake-up: the sender looks at all of its commands together."""
        try:
            async with self._runtime.database.write() as transaction:
                await transaction.execute(
                    update(VersionCommand)
                    .where(VersionCommand.id.in_(commands))
                    .values(done_at=self._runtime.clock(), error_message=failure)
                    .execution_options(synchronize_session=False)
                )
                done = partial(self._runtime.wakeups.announce, version_command_topic(commands[0]))
                after_commit(transaction, done)
        except Unavailable as outage:
            # The commands stay open. A later look runs them again.
            log.warning("version command %s could not be recorded: %s", commands[0], outage.message)
            return
        self._look.set()
