"""The mark of a data folder: which database's rows name its files."""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from store.data_folder import DataFolder
from store.flushed_paths import flush_path

MARK = "database-id"
"""File of the data folder with its mark. The database has the same one (``store.tables.ServicePresence``)."""
_MOST_LETTERS = 32


def new_mark() -> str:
    """Return a mark that no folder has."""
    return uuid4().hex


def read_mark(folder: DataFolder) -> str | None:
    """Return the folder's mark, None for a folder that no database has marked. An empty file is no mark."""
    with suppress(FileNotFoundError):
        return folder.path(MARK).read_text(errors="replace").strip()[:_MOST_LETTERS] or None
    return None


def write_mark(folder: DataFolder, mark: str) -> str:
    """Mark the folder, which is made where it is missing, unless it is marked; return its mark. Raises ``OSError``."""
    path = folder.path(MARK)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{MARK}.{uuid4().hex}")
    try:
        written.write_text(f"{mark}\n")
        # A name that the disk keeps without its bytes would be an empty mark after a power cut.
        flush_path(written)
        _name(written, path, folder)
    finally:
        written.unlink(missing_ok=True)
    flush_path(path.parent)
    return read_mark(folder) or mark


def _name(written: Path, path: Path, folder: DataFolder) -> None:
    """Give the written mark its name, which it takes from an empty file alone."""
    try:
        # Whoever links first has marked the folder; the mark is never seen half written.
        os.link(written, path)
    except FileExistsError:
        if read_mark(folder) is None:
            written.replace(path)
