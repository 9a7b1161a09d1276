"""Removal of folders of checkpoints, snapshots, staged archives and dead trainers' records, once their rows are gone."""

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta

from ledger.runtime import Runtime
from tenants.checkpoints import CHECKPOINTS, SNAPSHOTS
from tenants.discarded_folders import forget_removed, put_last
from tenants.recorded_folders import removable, unrecorded_folders
from tenants.trainers import RECORDS
from tenants.weight_jobs import IMPORTS
from workers.housekeeping.step import SMALL, Batch

log = logging.getLogger(__name__)

_PARENTS = (CHECKPOINTS, SNAPSHOTS, IMPORTS, RECORDS)
"""Folders whose entries rows name, in the order in which orphans are looked for."""
_UNNOTICED = timedelta(minutes=1)
"""Longest time for which a transaction that has read a checkpoint's row may go on without noticing that it was deleted."""
_SETTLED_SECONDS = 24 * 3600.0
_FOLDERS_AT_ONCE = 32
_ASKED_AT_ONCE = 500
_LOOKED_AT = 10 * _ASKED_AT_ONCE
"""Most folders that one batch looks at. Each batch lists the names of all folders, to find where it begins."""


class FolderRemoval:
    """Removes folders from one service's data folder."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def empty_trash(self, *, most: int) -> int:
        """Remove at most ``most`` folders of deleted checkpoints that nothing reads; return how many. Raises ``Unavailable``.

        A folder stays while a sample in flight draws from it, while a replay may need it, and until every living pool has
        unloaded the version: a vLLM server dies of an adapter whose folder is gone.
        """
        before = self._runtime.clock() - _UNNOTICED
        async with self._runtime.database.read() as session:
            found = await removable(session, discarded_before=before, most=most)
        if not found:
            return 0
        unread = await self._runtime.publication.withdraw([one.checkpoint for one in found])
        folders = [one.directory for one in found if one.checkpoint in unread]
        await self.remove(folders)
        kept = [one.directory for one in found if one.checkpoint not in unread]
        async with self._runtime.database.write() as transaction:
            await forget_removed(transaction, folders)
            await put_last(transaction, kept, now=self._runtime.clock())
        return len(folders)

    async def remove(self, folders: Sequence[str]) -> None:
        """Remove folders that nothing reads, and what writers that died left half-written of them."""
        if folders:
            await self._runtime.database.flush()
        remaining = [*folders, *await asyncio.to_thread(self._runtime.data_folder.half_written, folders)]
        for begin in range(0, len(remaining), _FOLDERS_AT_ONCE):
            some = remaining[begin : begin + _FOLDERS_AT_ONCE]
            await asyncio.gather(*(asyncio.to_thread(self._runtime.data_folder.remove, folder) for folder in some))

    async def remove_orphans(self, *, after: str = "", most: int = SMALL) -> Batch:
        """Remove folders of checkpoints, snapshots, archives and records that no row names, among the next ones after ``after``.

        A batch ends once ``most`` folders went, or a few more.

        A process leaves such a folder when it dies between writing and recording the folder, or between deleting the row
        and removing the folder. A trainer that dies leaves its record. Folders changed within the last day stay, since some
        process may be about to record them.
        """
        removed, folder = 0, self._runtime.data_folder
        place = _PARENTS.index(after.partition("/")[0] or CHECKPOINTS)
        parent, further = _PARENTS[place], _PARENTS[place + 1 :]
        seen = await asyncio.to_thread(folder.folders_after, parent, after, most=_LOOKED_AT)
        # A host whose clock is ahead would take folders that are just being written for old ones.
        oldest = await asyncio.to_thread(folder.now, parent) - _SETTLED_SECONDS if seen else 0.0
        for begin in range(0, len(seen), _ASKED_AT_ONCE):
            some = await asyncio.to_thread(folder.unchanged, seen[begin : begin + _ASKED_AT_ONCE], since=oldest)
            async with self._runtime.database.read() as session:
                orphans = await unrecorded_folders(session, some)
            for orphan in orphans:
                log.info("removing %s: no row names it", orphan)
            await self.remove(orphans)
            removed += len(orphans)
            if removed >= most:
                return Batch(removed, seen[min(begin + _ASKED_AT_ONCE, len(seen)) - 1])
        if len(seen) == _LOOKED_AT:
            return Batch(removed, seen[-1])
        return Batch(removed, f"{further[0]}/" if further else None)
