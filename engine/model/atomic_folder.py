"""Writes folders atomically: files go to a temporary folder, are synced, and the folder is renamed into place."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError

_SYSTEM_ERROR = re.compile(r'\(os error (\d+)\)(?: at path "[^"]*")?$')
"""End of the text of an error of the disk that safetensors has met while it wrote. What comes before may quote names."""


def write_atomically(directory: Path, fill: Callable[[Path], None]) -> int:
    """Let ``fill`` write files into a folder that then becomes ``directory``, and return the files' bytes.

    Raises the errors of ``fill``, and ``OSError``, leaving nothing behind. An error of the disk that safetensors reports is an
    ``OSError``, too.
    """
    staging = directory.with_name(f".{directory.name}.{uuid4().hex}")
    is_first = not directory.parent.exists()
    staging.mkdir(parents=True)
    try:
        fill(staging)
        written = list(staging.rglob("*"))
        size = sum(sync(path) for path in written if path.is_file())
        for folder in [path for path in written if path.is_dir()]:
            sync(folder)
        sync(staging)
        staging.rename(directory)
        sync(directory.parent)
        if is_first:
            sync(directory.parent.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if (number := _system_error(error)) is not None:
            raise OSError(number, os.strerror(number)) from error
        raise
    return size


def _system_error(error: BaseException) -> int | None:
    """Return the number of the disk's error that safetensors reports in its own, None if it reports none."""
    found = _SYSTEM_ERROR.search(str(error)) if isinstance(error, SafetensorError) else None
    return None if found is None else int(found[1])


def sync(path: Path) -> int:
    """Have the disk keep a file or a folder, and return its bytes. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
