"""The work of an import: from a staged archive to a checkpoint's folder."""

import shutil
import tempfile
from pathlib import Path

from contracts.operations import LoraSettings
from engine.model.adapter_archive import Progress
from engine.model.adapter_import import ImportBounds, import_adapter, write_imported
from engine.model.base import BaseModel
from tenants.weight_jobs import ARCHIVE


def write_import(
    staged: Path, directory: Path, base: BaseModel, bounds: ImportBounds, progress: Progress
) -> tuple[int, LoraSettings]:
    """Write the adapter in the archive of the folder ``staged`` as the checkpoint ``directory``, on a thread.

    Return the checkpoint's size in bytes and the adapter's settings. What is unpacked lies in ``staged`` meanwhile. Raises
    ``InvalidRequest`` for an archive that is refused, ``OSError`` of the disk, and what ``progress`` raises.
    """
    for left in [entry for entry in staged.iterdir() if entry.is_dir()]:
        # An attempt that died left it.
        shutil.rmtree(left, ignore_errors=True)
    archive = staged / ARCHIVE
    size = archive.stat().st_size
    with tempfile.TemporaryDirectory(dir=staged) as work:
        weights = import_adapter(archive, Path(work), base, bounds, progress)
    progress(size, size)
    return write_imported(directory, base, weights), weights.settings
