"""Removal of folders of checkpoints and snapshots, once their rows are gone."""

import asyncio
import logging
from collections.abc import Sequence
from time import time

from ledger.runtime import Runtime
from tenants.checkpoints import CHECKPOINTS, SNAPSHOTS, checkpoint_in
from tenants.recorded_folders import unrecorded_folders

log = logging.getLogger(__name__)

_SETTLED_SECONDS = 24 * 3600.0
_FOLDERS_AT_ONCE = 32
_ASKED_AT_ONCE = 500


class FolderRemoval:
    """Removes folders from one service's data folder."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def remove_checkpoints(self, folders: Sequence[str]) -> None:
        """Remove folders of deleted checkpoints, once no replica has the versions loaded. Raises ``Unavailable``."""
        await self._runtime.publication.withdraw([checkpoint_in(folder) for folder in folders])
        await self.remove(folders)

    async def remove(self, folders: Sequence[str]) -> None:
        """Remove folders that nothing reads."""
        for begin in range(0, len(folders), _FOLDERS_AT_ONCE):
            some = folders[begin : begin + _FOLDERS_AT_ONCE]
            await asyncio.gather(*(asyncio.to_thread(self._runtime.data_folder.remove, folder) for folder in some))

    async def remove_orphans(self, *, settled: bool) -> int:
        """Remove checkpoint and snapshot folders that no row names; return how many.

        A process leaves such a folder when it dies between writing and recording the folder, or between deleting the row
        and removing the folder. Without ``settled``, call this only while no other process writes to the data folder. With
        ``settled``, folders changed within the last day stay, since another process may be about to record them.
        """
        oldest = time() - _SETTLED_SECONDS if settled else None
        removed = 0
        for parent in (CHECKPOINTS, SNAPSHOTS):
            folders = await asyncio.to_thread(self._runtime.data_folder.folders, parent, before=oldest)
            for begin in range(0, len(folders), _ASKED_AT_ONCE):
                async with self._runtime.database.read() as session:
                    orphans = await unrecorded_folders(session, folders[begin : begin + _ASKED_AT_ONCE])
                for folder in orphans:
                    log.info("removing %s: no row names it", folder)
                await self.remove(orphans)
                removed += len(orphans)
        return removed
