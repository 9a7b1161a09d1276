"""Copy of a folder whose files never change: hard links, or copies where the file system has none."""

import os
import shutil
from errno import EDQUOT, ENOENT, ENOSPC
from pathlib import Path
from uuid import uuid4

from store.flushed_paths import flush_path
from store.folder_files import files_of

_FINAL = {ENOENT, ENOSPC, EDQUOT}


def copy_folder(source: Path, target: Path) -> None:
    """Make the new folder ``target`` with the files of ``source``, whole or not at all, and flushed to the disk.

    Its time is that of the copy, so that nobody takes it for an old one. Raises ``OSError``; for a source that cannot be seen,
    or a file that goes meanwhile, ``FileNotFoundError``.
    """
    files = files_of(source)
    unfinished = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        unfinished.mkdir()
        for name, path in files.items():
            made = unfinished / name
            made.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, made)
        for folder in (*(path for path in unfinished.rglob("*") if path.is_dir()), unfinished):
            flush_path(folder)
        unfinished.rename(target)
        flush_path(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        # Not every file system has hard links, and each bounds how many a file has.
        if error.errno in _FINAL:
            raise
        shutil.copyfile(source, target)
        flush_path(target)
