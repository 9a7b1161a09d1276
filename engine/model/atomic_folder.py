"""Folders that are there completely or not at all: written beside their place, synced, renamed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4


def write_whole(directory: Path, fill: Callable[[Path], None]) -> int:
    """Let ``fill`` write files into a folder that then becomes ``directory``; returns their bytes.

    Raises what ``fill`` raises and ``OSError``, leaving nothing behind.
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
