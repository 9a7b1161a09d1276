"""Writes folders atomically: files go to a temporary folder, are synced, and the folder is renamed into place."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def write_atomically(directory: Path, fill: Callable[[Path], None]) -> int:
    """Let ``fill`` write files into a folder that then becomes ``directory``, and return the files' bytes.

    Raises the errors of ``fill``, and ``OSError``, leaving nothing behind. An error of the disk that safetensors reports is an
    ``OSError``, too.
    """
    staging = directory.with_name(f".{directory.name}.{uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        fill(staging)
        written = list(staging.rglob("*"))
        size = sum(_sync(path) for path in written if path.is_file())
        for folder in [path for path in written if path.is_dir()]:
            _sync(folder)
        _sync(staging)
        staging.rename(directory)
        _sync(directory.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, SafetensorError) and (number := _SYSTEM_ERROR.search(str(error))) is not None:
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise
    return size


def _sync(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
