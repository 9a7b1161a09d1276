"""Housekeeping: a periodic sweep that deletes what has expired and reaps forsaken processes.

A sweep ends silent sessions, opens expired gates, deletes expired checkpoints, links and commands, and prunes old results.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from time import time

from sqlalchemy import delete

from ledger.pruning import PRUNE_BATCH, prune
from ledger.runtime import Runtime
from store.repeat import repeat
from store.tables import VersionCommand
from tenants.checkpoints import CHECKPOINTS, SNAPSHOTS, checkpoint_in, delete_expired
from tenants.downloads import delete_expired_links
from tenants.gates import open_expired
from tenants.recorded_folders import recorded_folders
from tenants.sessions import end_silent_sessions
from workers.leases.reaper import reap_forsaken

log = logging.getLogger(__name__)

_FOLDERS_AT_ONCE = 32
_SETTLED_SECONDS = 24 * 3600.0
_STALE_COMMAND = timedelta(hours=1)
"""Age at which a version command is deleted. No sender waits so long, so its sender has died."""


class Housekeeping:
    """The periodic sweep of one service."""

    def __init__(self, runtime: Runtime, may_declare_dead: Callable[[], bool]) -> None:
        """Ask ``may_declare_dead`` whether this process may declare dead a process whose lease has ended (``reap_forsaken``)."""
        self._runtime = runtime
        self._may_declare_dead = may_declare_dead
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Sweep every ``housekeeping_interval`` until ``stop``."""
        seconds = self._runtime.settings.housekeeping_interval.total_seconds()
        await repeat(self.sweep, seconds=seconds, stopping=self._stopping, failed="housekeeping sweep failed")

    def stop(self) -> None:
        """End ``run`` after the sweep in hand."""
        self._stopping.set()

    async def sweep(self) -> None:
        """Sweep once: rows first, then the folders of the deleted rows. Raises ``Unavailable``."""
        now = self._runtime.clock()
        folders = await self._delete_expired(now)
        await reap_forsaken(self._runtime, may_declare_dead=self._may_declare_dead)
        for begin in range(0, len(folders), _FOLDERS_AT_ONCE):
            await asyncio.gather(*(self._remove(folder) for folder in folders[begin : begin + _FOLDERS_AT_ONCE]))
        await self._prune(now)

    async def _delete_expired(self, now: datetime) -> list[str]:
        """Delete or close expired rows in one transaction; return the folders of the deleted checkpoints."""
        runtime, settings = self._runtime, self._runtime.settings
        async with runtime.database.write() as transaction:
            await end_silent_sessions(transaction, silent_since=now - settings.session_timeout, clock=runtime.clock)
            for _, base_model in await open_expired(transaction, runtime.clock):
                runtime.ledger.announce_gates(transaction, base_model)
            await delete_expired_links(transaction, runtime.clock)
            await transaction.execute(delete(VersionCommand).where(VersionCommand.created_at < now - _STALE_COMMAND))
            return await delete_expired(transaction, now=now, orphaned_before=now - settings.result_grace)

    async def _prune(self, now: datetime) -> None:
        """Prune results past their grace time, one batch in each transaction."""
        pruned = PRUNE_BATCH
        while pruned == PRUNE_BATCH:
            async with self._runtime.database.write() as transaction:
                finished_before = now - self._runtime.settings.result_grace
                pruned = await prune(transaction, finished_before=finished_before, now=self._runtime.clock())

    async def _remove(self, folder: str) -> None:
        """Remove the folder of a deleted checkpoint, once no replica has the version loaded."""
        await self._runtime.publication.withdraw(checkpoint_in(folder))
        await asyncio.to_thread(self._runtime.data_folder.remove, folder)

    async def remove_orphans(self, *, settled: bool = False) -> None:
        """Remove checkpoint and snapshot folders that no row names.

        A process leaves such a folder when it dies between writing and recording the folder, or between deleting the row
        and removing the folder. Without ``settled``, call this only while no other process writes to the data folder. With
        ``settled``, folders changed within the last day stay, since another process may be about to record them.
        """
        oldest = time() - _SETTLED_SECONDS if settled else None
        data_folder = self._runtime.data_folder
        async with self._runtime.database.read() as session:
            known = await recorded_folders(session)
        for parent in (CHECKPOINTS, SNAPSHOTS):
            for folder in await asyncio.to_thread(data_folder.folders, parent):
                if folder not in known and self._is_older(folder, oldest):
                    log.info("removing %s: no row names it", folder)
                    await asyncio.to_thread(data_folder.remove, folder)

    def _is_older(self, folder: str, than: float | None) -> bool:
        """Return whether the folder's last change was before ``than``, in seconds since the epoch; None: always."""
        if than is None:
            return True
        try:
            return self._runtime.data_folder.path(folder).stat().st_mtime < than
        except FileNotFoundError:
            return False
