"""The mark of a data folder: which database's rows name its files."""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from store.data_folder import DataFolder

MARK = "database-id"
"""File of the data folder with its mark. The database has the same one (``store.tables.ServicePresence``)."""
_MOST_LETTERS = 32


def new_mark() -> str:
    """Return a mark that no folder has."""
    return uuid4().hex


def read_mark(folder: DataFolder) -> str | None:
    """Return the folder's mark, None for a folder that no database has marked."""
    with suppress(FileNotFoundError):
        return folder.path(MARK).read_text(errors="replace").strip()[:_MOST_LETTERS]
    return None


def write_mark(folder: DataFolder, mark: str) -> None:
    """Mark the folder, which is made where it is missing, unless it is marked."""
    path = folder.path(MARK)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{MARK}.{uuid4().hex}")
    try:
        written.write_text(f"{mark}\n")
        with suppress(FileExistsError):
            # Whoever links first has marked it; the mark is never seen half written.
            os.link(written, path)
    finally:
        Path.unlink(written)
