"""Request bodies within a size limit: read and expanded from zstd piece by piece, refused as soon as one grows too large."""

import asyncio

import zstandard
from starlette.requests import Request

from contracts.errors import InvalidRequest, PayloadTooLarge

_WINDOW_LOG_MAX = 27
"""Largest window that a zstd frame may ask for: 128 MiB."""
_PIECE = 1024
"""Bytes expanded at once. zstd turns 4 bytes into a block of 128 KiB at most, so a piece grows to 32 MiB at worst."""
KEPT_OF_TOO_LARGE = 64 * 1024
"""Bytes kept of a body over the limit: enough to read its model_id and seq_id."""


class OversizedBody(PayloadTooLarge):
    """Refusal of a body over the limit; ``beginning`` holds the body's first bytes, expanded."""

    def __init__(self, message: str, beginning: bytes) -> None:
        super().__init__(message)
        self.beginning = beginning


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body, expanded if ``Content-Encoding`` is zstd.

    Raises ``OversizedBody`` (a ``PayloadTooLarge``) beyond ``limit`` bytes before or after expansion, ``InvalidRequest``
    for another encoding or a damaged frame.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "zstd"):
        raise InvalidRequest(f"Content-Encoding {encoding[:50]!r} is not taken; send zstd or none")
    pieces: list[bytes] = []
    size = 0
    is_too_large = False
    async for piece in request.stream():
        size += len(piece)
        pieces.append(piece)
        if size > limit:
            is_too_large = True
            break
    body = b"".join(pieces)
    if encoding == "zstd":
        # A few bytes may expand to the whole limit, so this never runs on the event loop.
        return await asyncio.to_thread(_expand, body, limit, is_cut=is_too_large)
    if is_too_large:
        raise _oversized(limit, body)
    return body


def _expand(body: bytes, limit: int, *, is_cut: bool) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**_WINDOW_LOG_MAX).decompressobj()
    expanded: list[bytes] = []
    size = 0
    try:
        for start in range(0, len(body), _PIECE):
            if decompressor.eof:
                break
            expanded.append(decompressor.decompress(body[start : start + _PIECE]))
            size += len(expanded[-1])
            if size > limit:
                raise _oversized(limit, b"".join(expanded))
    except zstandard.ZstdError as error:
        raise InvalidRequest(
            "the body is not valid zstd; compress it again or send it without Content-Encoding"
        ) from error
    if is_cut:
        raise _oversized(limit, b"".join(expanded))
    if not decompressor.eof:
        raise InvalidRequest("the body's zstd frame is cut short; send the whole frame")
    return b"".join(expanded)


def _oversized(limit: int, body: bytes) -> OversizedBody:
    # Cut at the limit, so that a repeat has the same beginning wherever its last piece was cut.
    beginning = body[: min(limit, KEPT_OF_TOO_LARGE)]
    return OversizedBody(f"the body is over the limit of {limit} bytes; send fewer sequences a request", beginning)
