"""Privacy of the data folder: it holds every tenant's weights, so only the service's own user may look into it."""

import logging
import os
from pathlib import Path

from contracts.errors import InvalidRequest

log = logging.getLogger(__name__)

PRIVATE_UMASK = 0o077
"""Mask of every weft process: its new folders are 0700 and its new files 0600."""
_OTHERS = 0o077
_DATABASE = "weft.db*"
_OWN_ENTRIES = ("weft.db", "checkpoints", "snapshots")


def open_private_folder(root: Path) -> None:
    """Make the data folder if there is none, and take the rights of other users off one that weft has used before.

    A folder of another owner, or without anything of weft's in it, is left as it is; ``weft doctor`` tells of it. Raises
    ``InvalidRequest`` where no folder can be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InvalidRequest(f"the data folder cannot be made: {error.strerror}; choose another with --data") from error
    if not any((root / name).exists() for name in _OWN_ENTRIES):
        return
    for path in (root, *root.glob(_DATABASE)):
        status = path.stat()
        if status.st_mode & _OTHERS and status.st_uid == os.getuid():
            path.chmod(status.st_mode & ~_OTHERS & 0o7777)
            log.warning("took the rights of other users off %s", path)


def others_may_enter(root: Path) -> bool:
    """Tell whether users other than the owner have any right on the data folder."""
    return bool(root.stat().st_mode & _OTHERS)
