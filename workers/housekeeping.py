"""Sweeps on a timer: silent sessions end, expired checkpoints go, old results are pruned."""

import asyncio
import logging

from sqlalchemy import select

from tenants.checkpoints import CHECKPOINTS, SNAPSHOTS, checkpoint_in, delete_expired
from tenants.clock import Clock
from tenants.data_folder import DataFolder
from tenants.database import Database
from tenants.gates import open_expired
from tenants.models import Checkpoint, Run
from tenants.sessions import end_silent_sessions
from tenants.settings import Settings
from workers.ledger.ledger import PRUNE_BATCH, Ledger
from workers.ledger.publication import Publication

log = logging.getLogger(__name__)


class Housekeeping:
    """The periodic sweep of one service."""

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        ledger: Ledger,
        publication: Publication,
        data_folder: DataFolder,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._database = database
        self._ledger = ledger
        self._publication = publication
        self._data_folder = data_folder
        self._clock = clock
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

    async def remove_orphans(self) -> None:
        """Remove folders that no row names: a process died between writing and recording one, or deleting and removing.

        Only while nothing else writes: at the start of a service that owns its data folder.
        """
        async with self._database.read() as session:
            known = set(await session.scalars(select(Checkpoint.directory)))
            known |= set(await session.scalars(select(Run.snapshot_dir).where(Run.snapshot_dir.is_not(None))))
        for parent in (CHECKPOINTS, SNAPSHOTS):
            for folder in await asyncio.to_thread(self._data_folder.folders, parent):
                if folder not in known:
                    log.info("removing %s: no row names it", folder)
                    await asyncio.to_thread(self._data_folder.remove, folder)

    async def sweep(self) -> None:
        """One sweep: rows in one transaction, then the files of what was deleted."""
        now = self._clock()
        async with self._database.write() as transaction:
            await end_silent_sessions(transaction, silent_since=now - self._settings.session_timeout, clock=self._clock)
            for _, base_model in await open_expired(transaction, self._clock):
                self._ledger.announce_gates(transaction, base_model)
            folders = await delete_expired(transaction, now=now, orphaned_before=now - self._settings.result_grace)
        for folder in folders:
            await self._publication.withdraw(checkpoint_in(folder))
            await asyncio.to_thread(self._data_folder.remove, folder)
        pruned = PRUNE_BATCH
        while pruned == PRUNE_BATCH:
            async with self._database.write() as transaction:
                pruned = await self._ledger.prune(transaction, finished_before=now - self._settings.result_grace)
