"""The record of the operations that a trainer computes now, in a file of the data folder that outlives the trainer.

When a trainer has died, the reaper reads its record: those operations may be the cause. A record costs one small write to
the page cache when work begins and one when it ends, and no transaction. The cache outlives a process, however it dies.
A machine that dies may lose a record, and then nothing counts against its operations.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from contracts.ids import RequestId
from store.data_folder import DataFolder
from tenants.trainers import RECORDS

log = logging.getLogger(__name__)

_FILE = "operations"
_END = "\n\n"
"""Text after the last id. The rest of the file is from earlier, longer records."""


class WorkInHand:
    """Operations that one trainer computes now. Used from one event loop."""

    def __init__(self) -> None:
        self.begun = 0
        """Number of times that work has begun. It grows while the trainer finds work."""
        self._held: Counter[RequestId] = Counter()
        self._earlier = 0
        """Number of operations that are in hand since before the record was opened anew."""
        self._waiting: dict[RequestId, Counter[RequestId] | None] = {}
        """Operations in ``waiting`` blocks; for each that has begun what it was held in."""
        self._file: int | None = None

    def __bool__(self) -> bool:
        return bool(self._held or self._earlier)

    async def open(self, data_folder: DataFolder, trainer: str) -> None:
        """Begin the trainer's record anew, in its file. Without a file, as on a full disk, only memory knows.

        Operations that are in hand already are not recorded: the trainer was taken for dead, and they were counted then.
        """
        file = await asyncio.to_thread(_opened, data_folder.path(f"{RECORDS}/{trainer}"))
        self.close()
        self._file = file
        self._earlier += self._held.total()
        self._held = Counter()
        self._write()

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
        held = self._held
        held.update(operations)
        self._write()
        try:
            yield
        except Exception:
            self._end(held, operations)
            raise
        self._end(held, operations)

    @contextmanager
    def waiting(self, operation: RequestId) -> Iterator[None]:
        """Record ``operation`` from ``begin`` to the end of the ``with`` block.

        A trainer that dies before says nothing about an operation that only waits. One that has begun stays recorded as in
        ``holding``.
        """
        self._waiting[operation] = None
        try:
            yield
        except Exception:
            self._end_waiting(operation)
            raise
        self._end_waiting(operation)

    def begin(self, *operations: RequestId) -> None:
        """Record that operations in ``waiting`` blocks wait no more. Others are left as they are."""
        begun = [one for one in operations if one in self._waiting and self._waiting[one] is None]
        if begun:
            self.begun += 1
            self._waiting.update(dict.fromkeys(begun, self._held))
            self._held.update(begun)
            self._write()

    def _end_waiting(self, operation: RequestId) -> None:
        if (held := self._waiting.pop(operation)) is not None:
            self._end(held, [operation])

    def _end(self, held: Counter[RequestId], operations: Sequence[RequestId]) -> None:
        if held is not self._held:
            self._earlier -= len(operations)
            return
        held.subtract(operations)
        for operation in operations:
            if not held[operation]:
                del held[operation]
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


def _opened(folder: Path) -> int | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A folder that was changed lately is not removed.
        os.utime(folder)
        return os.open(folder / _FILE, os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        log.error("no record of the work in hand is kept: %s", error.strerror)
        return None


def read_record(data_folder: DataFolder, trainer: str) -> list[RequestId]:
    """Return the operations that the trainer had in hand, as far as a record is there. Blocking."""
    try:
        text = (data_folder.path(f"{RECORDS}/{trainer}") / _FILE).read_text()
    except (OSError, UnicodeDecodeError):
        return []
    return [RequestId(line) for line in text.partition(_END)[0].split("\n") if line]


def keep_record(data_folder: DataFolder, trainer: str) -> None:
    """Have the record of a trainer that was taken for dead kept for a day: the trainer may live, and write there. Blocking."""
    with suppress(OSError):
        os.utime(data_folder.path(f"{RECORDS}/{trainer}"))


def remove_record(data_folder: DataFolder, trainer: str) -> None:
    """Remove the trainer's record, if there is one. Blocking."""
    data_folder.remove(f"{RECORDS}/{trainer}")
