"""Tells a file that is gone or damaged from one that cannot be reached for a while, as when a shared disk is away."""

from contextlib import suppress
from pathlib import Path

from contracts.errors import FilesUnread, InvalidRequest, WeftError


def why_unreadable(path: Path, error: Exception, damaged: InvalidRequest) -> WeftError:
    """Return why the file of a folder could not be read: ``damaged``, or ``FilesUnread`` if it may be there all the same.

    A file is gone once it is not in its folder, or its folder not among the others. Only an ``OSError`` is the disk's:
    safetensors raises one where it cannot open or map a file, and its own errors quote what the file holds.
    """
    if not isinstance(error, OSError):
        return damaged
    # Looked up anew: safetensors calls every file that cannot be opened not found.
    with suppress(OSError):
        if not path.is_file() and path.parent.parent.is_dir():
            return damaged
    return FilesUnread("the data folder cannot be read now; it is tried again")


def has_file(path: Path) -> bool:
    """Return whether a folder that was read a moment ago has this file. Raises ``FilesUnread``."""
    with suppress(OSError):
        if path.is_file():
            return True
        if path.parent.is_dir():
            return False
    raise FilesUnread("the data folder cannot be read now; it is tried again")
