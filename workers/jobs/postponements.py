"""Postponements of jobs whose work cannot read a file: other jobs go on, and no job is postponed for ever."""

from collections.abc import Set

from store.data_folder import DataFolder
from store.unread_files import UnreadFiles
from tenants.checkpoints import CHECKPOINTS


class Postponements:
    """Jobs that this process has postponed. Once their file is taken for lost, further postponements count as attempts."""

    def __init__(self, folder: DataFolder) -> None:
        self._unread = UnreadFiles(folder, CHECKPOINTS)
        self._of_round: set[str] = set()

    @property
    def of_round(self) -> Set[str]:
        """Jobs of this round, which the next round tries again."""
        return self._of_round

    def begin_round(self) -> None:
        """Have every job tried again."""
        self._of_round.clear()

    async def add(self, job: str) -> bool:
        """Postpone a job until the next round. Return whether this counts as an attempt."""
        self._of_round.add(job)
        return await self._unread.is_lost(job)
