"""Files that cannot be read, and for how long: a data folder that is away is waited for, and one lost file is not."""

import asyncio
from dataclasses import dataclass
from threading import Lock
from time import monotonic

from store.data_folder import DataFolder

LONGEST_SECONDS = 600.0
"""Time for which a file is tried again, the data folder being there. It is lost after that, or not weft's to read."""
_LONGEST_GAP_SECONDS = 30.0
"""Time that counts between two tries at most: nobody has tried meanwhile, and the file may have been there."""
_MOST_KNOWN = 10_000


@dataclass(slots=True)
class _Tries:
    """Tries of a file that have failed, one after the other."""

    last: float
    seconds: float = 0.0


class UnreadFiles:
    """Work that waits for a file, by its key. While the files' own folder is away no time counts. Thread-safe."""

    def __init__(self, folder: DataFolder, within: str) -> None:
        """``within``: folder of the files, relative to the data folder."""
        self._folder = folder
        self._within = within
        self._tries: dict[str, _Tries] = {}
        """Tries by key, the latest begun last."""
        self._lock = Lock()

    async def is_lost(self, key: str) -> bool:
        """Note that a try has failed. Return whether tries have failed for ``LONGEST_SECONDS``."""
        return await asyncio.to_thread(self.is_lost_after, key)

    def is_lost_after(self, key: str) -> bool:
        """Do as ``is_lost`` on a thread that may block."""
        is_there = self._is_there()
        with self._lock:
            if not is_there:
                self._tries.clear()
                return False
            now = monotonic()
            tries = self._tries.setdefault(key, _Tries(now))
            tries.seconds += min(now - tries.last, _LONGEST_GAP_SECONDS)
            tries.last = now
            if len(self._tries) > _MOST_KNOWN:
                del self._tries[next(iter(self._tries))]
            return tries.seconds > LONGEST_SECONDS

    def forget(self, key: str) -> None:
        """Note that the work has ended, or its file was read."""
        with self._lock:
            self._tries.pop(key, None)

    def _is_there(self) -> bool:
        try:
            return self._folder.path(self._within).is_dir()
        except OSError:
            return False
