"""Sweeps on a timer: silent sessions end, expired checkpoints go, old results are pruned, the dead are reaped."""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from time import time

from sqlalchemy import delete, select

from ledger.pruning import PRUNE_BATCH, prune
from store.tables import Checkpoint, Run, VersionCommand
from tenants.checkpoints import CHECKPOINTS, SNAPSHOTS, checkpoint_in, delete_expired
from tenants.downloads import delete_expired_links
from tenants.gates import open_expired
from tenants.sessions import end_silent_sessions
from workers.leases.reaper import reap_forsaken
from workers.runtime import Runtime

log = logging.getLogger(__name__)

_FOLDERS_AT_ONCE = 32
_SETTLED_SECONDS = 24 * 3600.0
_STALE_ORDER = timedelta(hours=1)
"""Nobody waits so long for an order to a sampling process: whoever gave it has died."""


class Housekeeping:
    """The periodic sweep of one service."""

    def __init__(self, runtime: Runtime, may_judge: Callable[[], bool]) -> None:
        """``may_judge``: whether processes that were not heard of for long are dead, as far as this one can tell."""
        self._may_judge = may_judge
        self._wakeups = runtime.wakeups
        self._moved = runtime.telemetry.metrics.lease_moved
        self._settings = runtime.settings
        self._database = runtime.database
        self._ledger = runtime.ledger
        self._publication = runtime.publication
        self._data_folder = runtime.data_folder
        self._clock = runtime.clock
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Sweep every ``housekeeping_interval`` until ``stop``."""
        while not self._stop.is_set():
            try:
                await self.sweep()
            except Exception:
                log.exception("housekeeping sweep failed; the next one tries again")
            try:
                async with asyncio.timeout(self._settings.housekeeping_interval.total_seconds()):
                    await self._stop.wait()
            except TimeoutError:
                continue

    def stop(self) -> None:
        """End after the sweep in hand."""
        self._stop.set()

    async def remove_orphans(self, *, settled: bool = False) -> None:
        """Remove folders that no row names: a process died between writing and recording one, or deleting and removing.

        While nothing else writes, at the start of a service that owns its data folder; elsewhere only those that are
        ``settled``, a day old: nobody is about to record them.
        """
        oldest = time() - _SETTLED_SECONDS if settled else None
        async with self._database.read() as session:
            known = set(await session.scalars(select(Checkpoint.directory)))
            known |= set(await session.scalars(select(Run.snapshot_dir).where(Run.snapshot_dir.is_not(None))))
        for parent in (CHECKPOINTS, SNAPSHOTS):
            for folder in await asyncio.to_thread(self._data_folder.folders, parent):
                if folder not in known and self._is_older(folder, oldest):
                    log.info("removing %s: no row names it", folder)
                    await asyncio.to_thread(self._data_folder.remove, folder)

    def _is_older(self, folder: str, than: float | None) -> bool:
        """By its last change; any is older than None."""
        if than is None:
            return True
        try:
            return self._data_folder.path(folder).stat().st_mtime < than
        except FileNotFoundError:
            return False

    async def _remove(self, folder: str) -> None:
        """Of a checkpoint whose row has gone: replicas forget it first."""
        await self._publication.withdraw(checkpoint_in(folder))
        await asyncio.to_thread(self._data_folder.remove, folder)

    async def sweep(self) -> None:
        """One sweep: rows in one transaction, then the files of what was deleted."""
        now = self._clock()
        async with self._database.write() as transaction:
            await end_silent_sessions(transaction, silent_since=now - self._settings.session_timeout, clock=self._clock)
            for _, base_model in await open_expired(transaction, self._clock):
                self._ledger.announce_gates(transaction, base_model)
            await delete_expired_links(transaction, self._clock)
            await transaction.execute(delete(VersionCommand).where(VersionCommand.created_at < now - _STALE_ORDER))
            folders = await delete_expired(transaction, now=now, orphaned_before=now - self._settings.result_grace)
        await reap_forsaken(
            self._database,
            self._wakeups,
            self._clock,
            lease=self._settings.lease,
            may_judge=self._may_judge,
            moved=self._moved,
        )
        for begin in range(0, len(folders), _FOLDERS_AT_ONCE):
            await asyncio.gather(*(self._remove(folder) for folder in folders[begin : begin + _FOLDERS_AT_ONCE]))
        pruned = PRUNE_BATCH
        while pruned == PRUNE_BATCH:
            async with self._database.write() as transaction:
                pruned = await prune(transaction, finished_before=now - self._settings.result_grace, now=self._clock())
