"""The data folder, which holds checkpoints and snapshots. Stored paths are relative to the folder, so that it can be moved."""

import heapq
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile


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

    def now(self, parent: str) -> float:
        """Return the time in seconds since the epoch by the clock that dates what is written in ``parent``.

        A file system on another machine has that machine's clock. Raises ``OSError``.
        """
        with TemporaryFile(dir=self.path(parent)) as newest:
            return os.fstat(newest.fileno()).st_mtime

    def unchanged(self, folders: Iterable[str], *, since: float) -> list[str]:
        """Return those of the folders that are there and were last changed before ``since`` (see ``now``)."""
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

    def half_written(self, folders: Iterable[str]) -> list[str]:
        """Return the folders that are beside ``folders`` and from which a writer that died would have made one of them."""
        names: defaultdict[str, set[str]] = defaultdict(set)
        for folder in folders:
            parent, _, name = folder.rpartition("/")
            names[parent].add(name)
        beside = ((parent, found) for parent in names for found in self._folders(parent))
        return [found for parent, found in beside if _written_for(found) in names[parent]]

    def remove(self, relative: str) -> None:
        """Remove a folder, if it exists."""
        shutil.rmtree(self.path(relative), ignore_errors=True)


def _written_for(folder: str) -> str | None:
    """Return the name of the folder that a half-written one would become (``engine.model.atomic_folder``)."""
    name = folder.rpartition("/")[2]
    return name[1:].rpartition(".")[0] if name.startswith(".") else None
