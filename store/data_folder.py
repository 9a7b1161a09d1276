"""The data folder, which holds checkpoints and snapshots. Stored paths are relative to the folder, so that it can be moved."""

import heapq
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


class DataFolder:
    """Resolves, lists and removes folders under ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def path(self, relative: str) -> Path:
        """Return the absolute path of ``relative``. Raises ``ValueError`` if it lies outside the root."""
        path = (self._root / relative).resolve()
        if not path.is_relative_to(self._root.resolve()):
            raise ValueError("path leaves the data folder")
        return path

    def folders(self, parent: str) -> list[str]:
        """Return the folders in ``parent``, half-written ones included, relative to the root."""
        return list(self._folders(parent))

    def folders_after(self, parent: str, after: str, *, most: int) -> list[str]:
        """Return the first ``most`` folders in ``parent`` whose paths come after ``after``, in order of their paths."""
        return heapq.nsmallest(most, (folder for folder in self._folders(parent) if folder > after))

    def unchanged(self, folders: Iterable[str], *, since: float) -> list[str]:
        """Return those of the folders that are there and were last changed before ``since``, in seconds since the epoch."""
        found = []
        for folder in folders:
            with suppress(FileNotFoundError):
                if self.path(folder).stat().st_mtime < since:
                    found.append(folder)
        return found

    def _folders(self, parent: str) -> Iterator[str]:
        path = self.path(parent)
        if not path.is_dir():
            return
        with os.scandir(path) as entries:
            yield from (f"{parent}/{entry.name}" for entry in entries if entry.is_dir())

    def remove(self, relative: str) -> None:
        """Remove a folder, if it exists."""
        shutil.rmtree(self.path(relative), ignore_errors=True)
