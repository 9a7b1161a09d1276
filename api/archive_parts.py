"""Archives whose upload broke off: one for a tenant is kept, so that the same request can go on where it ended.

A part is a file ``imports/part-TENANT/DIGEST``, the digest of the key that sent it and of its ``Idempotency-Key``. Moves of files
hand it on, so that no two requests write one. No row names it: housekeeping removes its folder a day after its last change, and
with the tenant.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from contracts.errors import SequenceConflict
from store.data_folder import DataFolder
from tenants.rights import Principal
from tenants.weight_jobs import parts_folder


class ArchivePart:
    """Place of what has come of one request's archive. Its methods are for threads."""

    def __init__(self, folder: DataFolder, caller: Principal, key: str) -> None:
        digest = hashlib.blake2b(f"{caller.key_id}/{key}".encode(), digest_size=16).hexdigest()
        self._parts = folder.path(parts_folder(caller.tenant))
        self._file = self._parts / digest

    def received(self) -> int:
        """Return how many bytes have come, 0 if nothing is kept."""
        with suppress(FileNotFoundError):
            return self._file.stat().st_size
        return 0

    def keep(self, archive: Path) -> None:
        """Keep the file ``archive`` in place of what was kept of the tenant's uploads before."""
        self.drop()
        self._parts.mkdir(parents=True, exist_ok=True)
        os.replace(archive, self._file)

    def drop(self) -> None:
        """Remove what is kept of the tenant's uploads."""
        with suppress(FileNotFoundError):
            for file in self._parts.iterdir():
                file.unlink(missing_ok=True)

    def take(self, archive: Path, offset: int) -> None:
        """Move the part to the file ``archive``, in a new folder. Raises ``SequenceConflict`` unless it ends at ``offset``."""
        received = self.received()
        if received == offset:
            archive.parent.mkdir(parents=True)
            with suppress(FileNotFoundError):
                os.replace(self._file, archive)
                return
            archive.parent.rmdir()
            received = 0
        raise SequenceConflict(
            f"Upload-Offset: {received} bytes of this archive are here; send what comes after them, or all of it without this"
        )
