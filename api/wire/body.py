"""Request bodies within a size limit: read and expanded from zstd piece by piece, refused as soon as one grows too large."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from io import BytesIO
from time import monotonic

import zstandard
from starlette.requests import Request

from api.wire.late_body import check_late_body
from contracts.errors import BodyTooSlow, InvalidRequest, PayloadTooLarge

_WINDOW_LOG_MAX = 27
"""Largest window that a zstd frame may ask for: 128 MiB."""
_MOST_AT_ONCE = 1024
"""Most bytes expanded at once. zstd turns 4 bytes into a block of 128 KiB at most, so a piece grows to 32 MiB at worst."""
_LEAST_AT_ONCE = 16
_USUAL_RATIO = 16
"""Times that a body usually grows at most."""
_USUAL_ROOM = 16 * 1024
"""Bytes of room beside that, for small bodies."""
_LARGE_PIECE = 256 * 1024
"""Size of an expanded piece beyond which the next pieces are smaller: other threads stand still while a piece is copied."""
SLOWEST_BYTES_A_SECOND = 4 * 1024
"""Slowest body that is read, beyond its first seconds."""
KEPT_OF_TOO_LARGE = 64 * 1024
"""Bytes kept of a body over the limit: enough to read its model_id and seq_id."""


class OversizedBody(PayloadTooLarge):
    """Refusal of a body over the limit; ``beginning`` holds the body's first bytes, expanded."""

    def __init__(self, message: str, beginning: bytes) -> None:
        super().__init__(message)
        self.beginning = beginning


@dataclass(frozen=True, slots=True)
class RawBody:
    """A body as it came. ``encoding`` is ``identity`` or ``zstd``; one that ``is_cut`` goes on beyond the limit."""

    content: bytes
    encoding: str
    is_cut: bool


async def read_body(request: Request, limit: int, *, idle_seconds: float) -> RawBody:
    """Read the body as it comes, and no more than ``limit`` bytes and a piece.

    Raises ``InvalidRequest`` for an encoding that is not taken, and as ``body_pieces`` and ``check_late_body``.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "zstd"):
        raise InvalidRequest(f"Content-Encoding {encoding[:50]!r} is not taken; send zstd or none")
    pieces: list[bytes] = []
    size = 0
    async with aclosing(body_pieces(request, idle_seconds=idle_seconds)) as stream:
        async for piece in stream:
            size += len(piece)
            pieces.append(piece)
            if size > limit:
                # What is recorded of it is the caller's act, as that of a whole body.
                await check_late_body(request)
                break
    return RawBody(b"".join(pieces), encoding, is_cut=size > limit)


async def body_pieces(
    request: Request, *, idle_seconds: float, slowest: int = SLOWEST_BYTES_A_SECOND
) -> AsyncGenerator[bytes, None]:
    """Yield the body's bytes as they come. After the last the caller of a late body is checked again (``check_late_body``).

    Raises ``BodyTooSlow`` when no byte comes for ``idle_seconds``, or when the whole comes slower than ``slowest`` bytes a
    second.
    """
    size, began = 0, monotonic()
    stream = request.stream()
    while True:
        left = idle_seconds + size / slowest - (monotonic() - began)
        try:
            async with asyncio.timeout(min(idle_seconds, max(left, 0))):
                piece = await anext(stream, None)
        except TimeoutError:
            raise BodyTooSlow("the body came too slowly; send it again") from None
        if piece is None:
            await check_late_body(request)
            return
        size += len(piece)
        yield piece


def expanded(raw: RawBody, limit: int) -> bytes:
    """Return the body, expanded if it is zstd.

    Raises ``OversizedBody`` (a ``PayloadTooLarge``) beyond ``limit`` bytes before or after expansion, ``InvalidRequest``
    for a damaged frame.
    """
    if raw.encoding == "zstd":
        return _expand(raw.content, limit, is_cut=raw.is_cut)
    if raw.is_cut:
        raise _oversized(limit, raw.content)
    return raw.content


def _expand(body: bytes, limit: int, *, is_cut: bool) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**_WINDOW_LOG_MAX).decompressobj()
    # Its value is the buffer itself, not a copy: a body may take a large part of what a process may take. The buffer takes memory
    # as it is written. One that grew with the body would be copied each time, while other threads stand still. It grows once.
    room = min(limit, _USUAL_RATIO * len(body) + _USUAL_ROOM)
    expanded = BytesIO(bytes(room))
    start, size = 0, _LEAST_AT_ONCE
    try:
        while start < len(body) and not decompressor.eof:
            piece = decompressor.decompress(body[start : start + size])
            start += size
            size = max(_LEAST_AT_ONCE, size // 2) if len(piece) > _LARGE_PIECE else min(_MOST_AT_ONCE, 2 * size)
            if room < min(limit, expanded.tell() + len(piece)):
                expanded.truncate()
                beginning, room, expanded = expanded.getvalue(), limit, BytesIO(bytes(limit))
                expanded.write(beginning)
            expanded.write(piece)
            if expanded.tell() > limit:
                raise _oversized(limit, expanded.getvalue())
    except zstandard.ZstdError as error:
        raise InvalidRequest(
            "the body is not valid zstd; compress it again or send it without Content-Encoding"
        ) from error
    expanded.truncate()
    if is_cut:
        raise _oversized(limit, expanded.getvalue())
    if not decompressor.eof:
        raise InvalidRequest("the body's zstd frame is cut short; send the whole frame")
    return expanded.getvalue()


def _oversized(limit: int, body: bytes) -> OversizedBody:
    # Cut at the limit, so that a repeat has the same beginning wherever its last piece was cut.
    beginning = body[: min(limit, KEPT_OF_TOO_LARGE)]
    return OversizedBody(f"the body is over the limit of {limit} bytes; send fewer sequences a request", beginning)
