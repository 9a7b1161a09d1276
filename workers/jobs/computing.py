"""The work of jobs: files in, a checkpoint's folder out. Knows no database, and runs in a process of its own."""

import errno
import shutil
import tempfile
import traceback
from pathlib import Path

from contracts.errors import InvalidRequest, Unavailable, WeftError
from engine.model.adapter_archive import Progress
from engine.model.adapter_import import import_adapter, write_imported
from engine.model.atomic_folder import write_atomically
from engine.model.merged_model import MergeSource
from engine.model.unreadable import why_unreadable
from workers.jobs.work import Failed, ImportWork, Made, MergeWork, Postponed, Refused, Work

_LONGEST_TRACEBACK = 20_000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that has no room for the files: to wait for it helps nobody."""


def do(work: Work, progress: Progress) -> Made | Refused | Postponed | Failed:
    """Do ``work`` and tell its ``progress``."""
    try:
        remove_left(work.abandoned)
        return _merge(work, progress) if isinstance(work, MergeWork) else _import(work, progress)
    except InvalidRequest as error:
        return Refused(error.message)
    except Unavailable as error:
        return Postponed(error.message)
    except Exception:  # noqa: BLE001 - the work's edge: a process that ends has its job tried again
        return Failed(traceback.format_exc()[-_LONGEST_TRACEBACK:])


def remove_left(directory: Path) -> None:
    """Remove what an attempt at the checkpoint ``directory`` has left, whole or half-written."""
    for left in [*directory.parent.glob(f".{directory.name}.*"), directory]:
        shutil.rmtree(left, ignore_errors=True)


def _merge(work: MergeWork, progress: Progress) -> Made:
    merged = MergeSource(work.base, work.names, work.adapter, work.dtype)
    if merged.total_bytes > work.room:
        raise InvalidRequest(
            f"the merged model would take {merged.total_bytes} bytes, and your storage has room for {max(work.room, 0)}; "
            "delete some checkpoints"
        )
    return Made(write_atomically(work.directory, lambda folder: merged.write(folder, progress)))


def _import(work: ImportWork, progress: Progress) -> Made:
    try:
        return _imported(work, progress)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise _why_unread(work, error) from error


def _imported(work: ImportWork, progress: Progress) -> Made:
    staged = work.archive.parent
    for left in [entry for entry in staged.iterdir() if entry.is_dir()]:
        # An attempt that died left it.
        shutil.rmtree(left, ignore_errors=True)
    size = work.archive.stat().st_size
    with tempfile.TemporaryDirectory(dir=staged) as unpacked:
        weights = import_adapter(work.archive, Path(unpacked), work.base, work.bounds, progress)
    progress(size, size)
    return Made(write_imported(work.directory, work.base, weights), weights.settings)


def _why_unread(work: ImportWork, error: OSError) -> WeftError:
    """Return why the archive could not be read or unpacked: it is gone, or it may be there all the same."""
    if not work.directory.parent.is_dir():
        # The data folder is away. The folder of archives is made anew for one that comes meanwhile.
        return Unavailable("the data folder cannot be reached now; the import is tried again")
    return why_unreadable(work.archive, error, InvalidRequest("the archive is not there any more; send it again"))
