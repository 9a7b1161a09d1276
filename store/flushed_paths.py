"""Flushes of files and folders to the disk: what is not flushed may be lost with the power."""

import os
from pathlib import Path


def flush_path(path: Path) -> None:
    """Have the disk keep a file's bytes, or a folder's entries: a new file without its entry is lost. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
