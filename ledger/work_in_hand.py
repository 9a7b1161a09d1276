"""The record of the operations that a trainer computes now, in a file of the data folder that outlives the trainer.

When a trainer has died, the reaper reads its record: those operations may be the cause. A record costs one small write to
the page cache when work begins and one when it ends, and no transaction. The cache outlives a process, however it dies.
A machine that dies may lose a record, and then nothing counts against its operations.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from contracts.ids import RequestId
from store.data_folder import DataFolder

log = logging.getLogger(__name__)

RECORDS = "in-hand"
"""Folder of the records, relative to the data folder: a folder for each trainer, by its id."""
_FILE = "operations"
_END = "\n\n"
"""Text after the last id. The rest of the file is from earlier, longer records."""


class WorkInHand:
    """Operations that one trainer computes now. Used from one event loop."""

    def __init__(self) -> None:
        self.begun = 0
        """Number of times that work has begun. It grows while the trainer finds work."""
        self._held: Counter[RequestId] = Counter()
        self._waiting: dict[RequestId, bool] = {}
        """Operations in ``waiting`` blocks; True for each that has begun."""
        self._file: int | None = None

    def __bool__(self) -> bool:
        return bool(self._held)

    def open(self, data_folder: DataFolder, trainer: str) -> None:
        """Write to the trainer's file from now on. Blocking. Without a file, as on a full disk, only memory knows."""
        path = data_folder.path(f"{RECORDS}/{trainer}") / _FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            log.error("no record of the work in hand is kept: %s", error.strerror)

    def close(self) -> None:
        """Write no more. The file stays: ``remove_record`` removes it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def holding(self, operations: Sequence[RequestId]) -> Iterator[None]:
        """Record ``operations`` for the ``with`` block.

        They stay recorded when an error that is no ``Exception`` leaves the block: the trainer ends, and they may be why.
        """
        self.begun += 1
        self._held.update(operations)
        self._write()
        try:
            yield
        except Exception:
            self._end(operations)
            raise
        self._end(operations)

    @contextmanager
    def waiting(self, operation: RequestId) -> Iterator[None]:
        """Record ``operation`` from ``begin`` to the end of the ``with`` block.

        A trainer that dies before says nothing about an operation that only waits. One that has begun stays recorded as in
        ``holding``.
        """
        self._waiting[operation] = False
        try:
            yield
        except Exception:
            self._end_waiting(operation)
            raise
        self._end_waiting(operation)

    def begin(self, *operations: RequestId) -> None:
        """Record that operations in ``waiting`` blocks wait no more. Others are left as they are."""
        begun = [one for one in operations if self._waiting.get(one) is False]
        if begun:
            self.begun += 1
            self._waiting.update(dict.fromkeys(begun, True))
            self._held.update(begun)
            self._write()

    def _end_waiting(self, operation: RequestId) -> None:
        if self._waiting.pop(operation):
            self._end([operation])

    def _end(self, operations: Sequence[RequestId]) -> None:
        self._held.subtract(operations)
        for operation in operations:
            if not self._held[operation]:
                del self._held[operation]
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            # One call, so that a process that dies here leaves either record. The file is never cut: that is slow on NFS.
            os.pwrite(self._file, ("\n".join(self._held) + _END).encode(), 0)
        except OSError as error:
            log.error("the record of the work in hand is not kept any more: %s", error.strerror)
            self.close()


def read_record(data_folder: DataFolder, trainer: str) -> list[RequestId]:
    """Return the operations that the trainer had in hand, as far as a record is there. Blocking."""
    try:
        text = (data_folder.path(f"{RECORDS}/{trainer}") / _FILE).read_text()
    except (OSError, UnicodeDecodeError):
        return []
    return [RequestId(line) for line in text.partition(_END)[0].split("\n") if line]


def remove_record(data_folder: DataFolder, trainer: str) -> None:
    """Remove the trainer's record, if there is one. Blocking."""
    data_folder.remove(f"{RECORDS}/{trainer}")
