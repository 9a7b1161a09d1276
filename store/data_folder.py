"""The data folder, which holds checkpoints and snapshots. Stored paths are relative to the folder, so that it can be moved."""

import shutil
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

    def folders(self, parent: str, *, before: float | None = None) -> list[str]:
        """Return the folders in ``parent``, half-written ones included, relative to the root.

        With ``before``, in seconds since the epoch, only those last changed before it.
        """
        path = self.path(parent)
        if not path.is_dir():
            return []
        return [f"{parent}/{child.name}" for child in path.iterdir() if child.is_dir() and _is_older(child, before)]

    def remove(self, relative: str) -> None:
        """Remove a folder, if it exists."""
        shutil.rmtree(self.path(relative), ignore_errors=True)


def _is_older(folder: Path, than: float | None) -> bool:
    if than is None:
        return True
    try:
        return folder.stat().st_mtime < than
    except FileNotFoundError:
        return False
