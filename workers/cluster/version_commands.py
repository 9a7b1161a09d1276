"""Runs the version commands that a sampling process gets: load an adapter's version on its replicas, or drop one.

``workers/cluster/publication.py`` sends the commands. Tenants take turns: the oldest command of each is begun before the
second of any, and a tenant has few loads at a time, because each is a task and a place in a replica's turns.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from sqlalchemy import case, func, select, update

from contracts.errors import EngineFailure, Unavailable, WeftError
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
"""Most versions of one tenant that a process loads at a time, with those whose publisher has given up waiting."""


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
        self._loads: Counter[str] = Counter()
        """Loads that have not ended, by tenant. A command's row may be gone before its load ends."""
        self._look = asyncio.Event()
        """Set when a command was sent, and when one has ended, which may leave its turn to another."""
        self._withdrawn: Batcher[tuple[str, WeftError | None], None] = Batcher(self._record_withdrawn)

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
        withdrawn = [command for command, _ in new if command.kind == VersionCommandKind.WITHDRAW]
        if withdrawn:
            self._start(withdrawn, self._withdraw_all(withdrawn))
        for command, tenant in new:
            if command.kind != VersionCommandKind.WITHDRAW and self._loads[tenant] < _LOADS_OF_TENANT:
                self._loads[tenant] += 1
                self._start([command], self._run_prepare(command)).add_done_callback(partial(self._load_ended, tenant))

    async def _next(self) -> list[tuple[VersionCommand, str]]:
        """Return commands to begin, each with its tenant: of all that are open the oldest of each tenant first.

        A tenant that has all its loads is asked for none.
        """
        is_withdrawal = VersionCommand.kind == VersionCommandKind.WITHDRAW
        full = [tenant for tenant, loads in self._loads.items() if loads >= _LOADS_OF_TENANT]
        turn = func.row_number().over(
            partition_by=(Run.tenant_id, VersionCommand.kind), order_by=(VersionCommand.created_at, VersionCommand.id)
        )
        tenant = func.coalesce(Run.tenant_id, "").label("tenant")
        mine = VersionCommand.process_id == self._process
        turns = (
            select(VersionCommand.id, tenant, turn.label("turn"))
            # A withdrawal by housekeeping names no run.
            .join(Run, Run.id == VersionCommand.run_id, isouter=True)
            .where(mine, VersionCommand.done_at.is_(None))
            .where(VersionCommand.id.not_in(few_lengths(list(self._running))))
            .where(is_withdrawal | tenant.not_in(few_lengths(full)))
            .subquery()
        )
        query = (
            select(VersionCommand, turns.c.tenant)
            .join(turns, turns.c.id == VersionCommand.id)
            .where(turns.c.turn <= case((is_withdrawal, _AT_ONCE), else_=_LOADS_OF_TENANT))
            .order_by(turns.c.turn, VersionCommand.created_at, VersionCommand.id)
            .limit(_AT_ONCE)
        )
        async with self._runtime.database.read() as session:
            return [(command, owner) for command, owner in await session.execute(query)]

    def _start(self, commands: Sequence[VersionCommand], work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=f"version commands {commands[0].id}")
        ids = [command.id for command in commands]
        self._running.update(dict.fromkeys(ids, task))
        task.add_done_callback(partial(self._ended, ids))
        return task

    def _ended(self, commands: Sequence[str], _task: "asyncio.Task[None]") -> None:
        for command in commands:
            del self._running[command]

    def _load_ended(self, tenant: str, _task: "asyncio.Task[None]") -> None:
        self._loads[tenant] -= 1
        if not self._loads[tenant]:
            del self._loads[tenant]
        # Only now is there room for the tenant's next load.
        self._look.set()

    async def _withdraw_all(self, commands: Sequence[VersionCommand]) -> None:
        """Drop the commands' versions, many at once. Those that end at one moment are recorded with one statement."""
        await asyncio.gather(*(self._run_withdraw(command) for command in commands))

    async def _run_withdraw(self, command: VersionCommand) -> None:
        """Drop one version. A version that cannot be dropped, or not yet, holds up no other."""
        failure: WeftError | None = None
        try:
            await self._withdraw(CheckpointId(command.version))
        except WeftError as error:
            failure = error
        await self._withdrawn.ask((command.id, failure))

    async def _record_withdrawn(self, ended: Sequence[tuple[str, WeftError | None]]) -> list[None]:
        failures = {_told(failure): failure for _, failure in ended}
        for told, failure in failures.items():
            await self._record([command for command, why in ended if _told(why) == told], failure)
        return [None] * len(ended)

    async def _run_prepare(self, command: VersionCommand) -> None:
        failure: WeftError | None = None
        version = CheckpointId(command.version)
        try:
            await self._prepare(RunId(command.run_id or ""), version)
        except WeftError as error:
            failure = error
        except Exception:
            log.exception("version=%s could not be loaded", version)
            failure = EngineFailure("the version could not be loaded; the service's log has the cause")
        await self._record([command.id], failure)

    async def _record(self, commands: Sequence[str], failure: WeftError | None) -> None:
        """Record the commands as carried out. One wake-up: the sender looks at all of its commands together."""
        code, message = _told(failure)
        try:
            async with self._runtime.database.write() as transaction:
                await transaction.execute(
                    update(VersionCommand)
                    .where(VersionCommand.id.in_(commands))
                    .values(done_at=self._runtime.clock(), error_code=code, error_message=message)
                    .execution_options(synchronize_session=False)
                )
                done = partial(self._runtime.wakeups.announce, version_command_topic(commands[0]))
                after_commit(transaction, done)
        except Unavailable as outage:
            # The commands stay open. A later look runs them again.
            log.warning("version command %s could not be recorded: %s", commands[0], outage.message)
            return
        self._look.set()


def _told(failure: WeftError | None) -> tuple[str | None, str | None]:
    """Return the code and the message that a command's row gets."""
    return (None, None) if failure is None else (failure.code, failure.message)
