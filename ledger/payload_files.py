"""Payloads as they are stored: small ones in their row, large ones each in a file of the data folder.

A file is written and flushed to the disk before the row that names it, and removed once the row is gone. The row has the
digest of the file's bytes, so a damaged file is noticed. Each operation has a file of its own: a file that two operations
share could be removed for one while it is written for the other.
"""

import asyncio
import hashlib
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar, cast
from uuid import UUID
from weakref import WeakValueDictionary

from sqlalchemy import Connection, Table, bindparam, select

from contracts.codec import encoded_bytes, pack
from contracts.errors import FilesUnread, Unavailable, WeftError
from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation, StoredPayload
from contracts.operations import Payload, SampleRequest, TrainingBatch
from store.batcher import few_lengths
from store.data_folder import DataFolder
from store.database import Database
from store.flushed_paths import flush_path
from store.tables import OperationPayload
from store.unread_files import UnreadFiles

T = TypeVar("T")

PAYLOADS = "payloads"
"""Folder of the files, with a folder for each first two characters of an operation's id."""
LARGEST_IN_ROW = 64 * 1024
"""Largest packed payload in bytes that is stored in its row. The database's log has every row once more."""
_INLINE_TOKENS = 2048
"""Most tokens of a payload that is packed on the event loop: for less, a thread would cost more than the work."""
_THREADS = 4
"""Threads of their own: adapters' files, which may be slow to write, hold no request up."""
_OF_TENANT = 2
"""Threads on which one tenant's payloads are written at a time, however large they are and however slow the disk is."""
_PRIVATE = 0o600
_SETTLED = timedelta(minutes=10)
"""Age of a file whose row is committed, if it ever will be."""
_LOOKED_UP = 512
_OWN_FOLDER = re.compile(f"{PAYLOADS}/[0-9a-f]{{2}}")
_OWN_FILE = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ROWS = cast(Table, OperationPayload.__table__)
_WITH_FILE = select(_ROWS.c.operation_id).where(_ROWS.c.file_digest.is_not(None)).order_by(_ROWS.c.operation_id)
_WITH_ROW = select(_ROWS.c.operation_id).where(_ROWS.c.operation_id.in_(bindparam("ids", expanding=True)))


class PayloadFiles:
    """Writes, reads and removes payload files."""

    def __init__(self, data_folder: DataFolder) -> None:
        self._folder = data_folder
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="payloads")
        self._unread = UnreadFiles(data_folder, PAYLOADS)
        self._of_tenants: WeakValueDictionary[TenantId, asyncio.Semaphore] = WeakValueDictionary()
        self._kept: set[Path] = set()
        """Folders whose own entries were flushed."""

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread for payloads and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def store(self, tenant: TenantId, operation: RequestId, payload: Payload) -> StoredPayload:
        """Pack the tenant's ``payload``; write its file when it is large.

        Raises ``Unavailable`` when the disk takes no more.
        """
        if _tokens(payload) <= _INLINE_TOKENS:
            return _in_row(pack(payload))

        async def written() -> StoredPayload:
            async with self._of_tenants.setdefault(tenant, asyncio.Semaphore(_OF_TENANT)):
                return await self.off_loop(partial(self._store, operation, payload))

        try:
            # A thread goes on when nobody waits for it any more, and stays its tenant's as long.
            return await asyncio.shield(written())
        except OSError as error:
            raise Unavailable("the data folder takes no more; the request is repeated until it does") from error

    def read(self, operation: str, digest: bytes) -> bytes:
        """Return the packed payload in the operation's file. Blocks.

        Raises ``ValueError`` when the file is gone, damaged or unreadable for long, ``FilesUnread`` when it cannot be read now.
        """
        try:
            body = self._path(operation).read_bytes()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._folder.path(PAYLOADS).is_dir():
                raise ValueError("its file is gone") from error
            if self._unread.is_lost_after(operation):
                raise ValueError("its file cannot be read") from error
            raise FilesUnread("the data folder cannot be read; it is tried again") from error
        self._unread.forget(operation)
        if _digest(body) != digest:
            raise ValueError("its file is damaged")
        return body

    async def remove(self, operations: Sequence[str]) -> None:
        """Remove the files of operations whose rows no longer name them."""
        if operations:
            await self.off_loop(partial(self._remove, operations))

    async def recorded(self, operation: NewOperation, accepting: Awaitable[RequestId]) -> RequestId:
        """Return what ``accepting`` returns, as ``all_recorded`` does for one operation."""

        async def accepted() -> list[RequestId]:
            return [await accepting]

        return (await self.all_recorded([operation], accepted()))[0]

    async def all_recorded(
        self, operations: Sequence[NewOperation], accepting: Awaitable[Sequence[RequestId]]
    ) -> Sequence[RequestId]:
        """Return what ``accepting`` returns, and remove the files of those of its operations that were not recorded.

        Raises what ``accepting`` raises. After ``Unavailable`` the files stay: the operations may have been recorded.
        """
        try:
            recorded = await accepting
        except Unavailable:
            raise
        except WeftError:
            await self._remove_of(operations)
            raise
        pairs = zip(operations, recorded, strict=True)
        await self._remove_of([operation for operation, request_id in pairs if request_id != operation.id])
        return recorded

    async def _remove_of(self, operations: Sequence[NewOperation]) -> None:
        await self.remove([operation.id for operation in operations if operation.payload.file_digest is not None])

    async def remove_forgotten(
        self, database: Database, *, after: str = "", unchanged: timedelta = _SETTLED
    ) -> tuple[int, str | None]:
        """Remove files of the next folder after ``after`` whose operations have no payload row any more.

        Return how many, and the folder, None after the last one. A file that has changed within ``unchanged`` stays: its row
        may not be committed yet. Raises ``Unavailable``.
        """
        folders = await asyncio.to_thread(self._folder.folders, PAYLOADS)
        # Others have come by a disk, or by those who copied files.
        folder = min((one for one in folders if one > after and _OWN_FOLDER.fullmatch(one)), default=None)
        if folder is None:
            return 0, None
        removed, written = 0, await asyncio.to_thread(self._written_before, folder, unchanged.total_seconds())
        for begin in range(0, len(written), _LOOKED_UP):
            some = written[begin : begin + _LOOKED_UP]
            async with database.read() as session:
                kept = set(await session.scalars(_WITH_ROW, {"ids": few_lengths(some)}))
            if forgotten := [operation for operation in some if operation not in kept]:
                await database.flush()
                await self.remove(forgotten)
            removed += len(forgotten)
        return removed, folder

    def _written_before(self, folder: str, seconds: float) -> list[str]:
        """Return the operations of the folder's files that have not changed for so long, by the clock that dates the files."""
        found, now = [], self._folder.now(PAYLOADS)
        with os.scandir(self._folder.path(folder)) as entries:
            for entry in entries:
                # A file may be removed meanwhile.
                with suppress(FileNotFoundError):
                    if _OWN_FILE.fullmatch(entry.name) and entry.stat().st_mtime < now - seconds:
                        found.append(entry.name)
        return found

    def _store(self, operation: RequestId, payload: Payload) -> StoredPayload:
        body = pack(payload)
        if len(body) <= LARGEST_IN_ROW:
            return _in_row(body)
        path = self._path(operation)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        flush_path(path.parent)
        if path.parent not in self._kept:
            for folder in (path.parent.parent, self._folder.path(".")):
                flush_path(folder)
            self._kept.add(path.parent)
        return StoredPayload(b"", file_digest=_digest(body), file_bytes=len(body), encoded_bytes=encoded_bytes(body))

    def _remove(self, operations: Iterable[str]) -> None:
        for operation in operations:
            self._path(operation).unlink(missing_ok=True)

    def _path(self, operation: str) -> Path:
        return self._folder.path(_file_of(operation))


def recorded_payload_files(connection: Connection, most: int) -> list[str]:
    """Return ``most`` files that rows name, relative to the data folder."""
    return [_file_of(operation) for operation in connection.scalars(_WITH_FILE.limit(most))]


def _file_of(operation: str) -> str:
    name = str(UUID(operation))
    return f"{PAYLOADS}/{name[:2]}/{name}"


def _in_row(body: bytes) -> StoredPayload:
    return StoredPayload(body, encoded_bytes=encoded_bytes(body))


def _tokens(payload: Payload) -> int:
    match payload:
        case TrainingBatch():
            return sum(datum.tokens.size + datum.targets.size for datum in payload.data)
        case SampleRequest():
            return int(payload.prompt.size)
        case _:
            return 0


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
