"""A request's body as a file: an archive, written as it comes and never held in memory."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from starlette.requests import Request

from api.wire.body import body_pieces
from api.wire.late_body import check_caller
from contracts.errors import InvalidRequest, Unavailable

_SLOWEST_BYTES_A_SECOND = 64 * 1024
"""Slowest archive that is read: 4 GiB take 18 h."""
_WRITTEN_AT_ONCE = 2**20
_TOUCHED_SECONDS = 60.0
"""Time after which the folder of an upload is touched again: writes to its file leave the folder's own time as it is."""
_PRIVATE = 0o600


async def store_body(
    request: Request,
    target: Path,
    check: Callable[[int], None],
    *,
    idle_seconds: float,
    is_ended: Callable[[], bool],
    offset: int = 0,
) -> int:
    """Write the body to the new file ``target``, in a new folder, flushed to the disk; return the file's bytes.

    With ``offset`` the file is there, of so many bytes, and the body is its rest. What has come stays in the file when the
    body does not come whole.

    ``check`` is told the size that is announced, before anything is read, and the size so far as the body comes; it raises
    for one too large. Once ``is_ended``, the next piece has the caller checked (``check_caller``).

    Raises ``InvalidRequest``, ``BodyTooSlow``, as the caller's check, and ``Unavailable`` when the disk takes no more.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise InvalidRequest("send the archive itself, a tar or a gzip of one, without Content-Encoding")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) < 20:
        check(offset + int(length))
    try:
        async with aclosing(body_pieces(request, idle_seconds=idle_seconds, slowest=_SLOWEST_BYTES_A_SECOND)) as pieces:
            return await _store(_of_caller(request, pieces, is_ended), target, check, offset)
    except OSError as error:
        raise Unavailable("the data folder takes no more; send the archive again later") from error


async def _of_caller(
    request: Request, pieces: AsyncIterator[bytes], is_ended: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield the pieces while the caller may send them."""
    async for piece in pieces:
        if is_ended():
            await check_caller(request)
        yield piece


async def _store(pieces: AsyncIterator[bytes], target: Path, check: Callable[[int], None], offset: int) -> int:
    file = await asyncio.to_thread(_open, target, offset)
    size, unwritten, touched_at = offset, bytearray(), monotonic()
    try:
        async for piece in pieces:
            size += len(piece)
            check(size)
            unwritten += piece
            if len(unwritten) >= _WRITTEN_AT_ONCE:
                await asyncio.to_thread(file.write, bytes(unwritten))
                unwritten.clear()
            if monotonic() - touched_at >= _TOUCHED_SECONDS:
                await asyncio.to_thread(os.utime, target.parent)
                touched_at = monotonic()
        await asyncio.to_thread(_finish, file, target, bytes(unwritten))
        unwritten.clear()
    finally:
        await asyncio.to_thread(_close, file, bytes(unwritten))
    return size


def _open(target: Path, offset: int) -> BinaryIO:
    if offset:
        return target.open("ab")
    target.parent.mkdir(parents=True)
    return open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "wb")


def _close(file: BinaryIO, rest: bytes) -> None:
    with file:
        file.write(rest)


def _finish(file: BinaryIO, target: Path, rest: bytes) -> None:
    """Write the rest, and flush the file and its entries to the disk: the row that names it will be there after a power cut."""
    file.write(rest)
    file.flush()
    os.fsync(file.fileno())
    for one in (target.parent, target.parent.parent):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
