"""Writes folders atomically: files go to a temporary folder, are synced, and the folder is renamed into place."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4


def write_atomically(directory: Path, fill: Callable[[Path], None]) -> int:
    """Let ``fill`` write files into a folder that then becomes ``directory``, and return the files' bytes.

    Raises the errors of ``fill``, and ``OSError``, leaving nothing behind.
    """
    staging = directory.with_name(f".{directory.name}.{uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        fill(staging)
        size = sum(_sync(file) for file in staging.iterdir())
        _sync(staging)
        staging.rename(directory)
        _sync(directory.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return size


def _sync(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
