"""Files that cannot be read, and for how long: a data folder that is away is waited for, and one lost file is not."""

import asyncio
from time import monotonic

from store.data_folder import DataFolder
from tenants.checkpoints import CHECKPOINTS

LONGEST_SECONDS = 600.0
"""Time for which a file is tried again, the data folder being there. It is lost after that, or not weft's to read."""
_MOST_KNOWN = 10_000


class UnreadFiles:
    """Work that waits for a file, by its key. While the data folder itself is away no time counts."""

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._since: dict[str, float] = {}
        """Time of the first try of each, the latest ones last."""

    async def is_lost(self, key: str) -> bool:
        """Note that a try has failed. Return whether tries have failed for ``LONGEST_SECONDS``."""
        if not await asyncio.to_thread(self._is_there):
            self._since.clear()
            return False
        since = self._since.setdefault(key, monotonic())
        if len(self._since) > _MOST_KNOWN:
            self.forget(next(iter(self._since)))
        return monotonic() - since > LONGEST_SECONDS

    def forget(self, key: str) -> None:
        """Note that the work has ended, or its file was read."""
        self._since.pop(key, None)

    def _is_there(self) -> bool:
        try:
            return self._folder.path(CHECKPOINTS).is_dir()
        except OSError:
            return False
