"""Reads a tar, plain or gzip, as hostile input: a stream of plain files, in memory and time that no header of it chooses.

``tarfile`` reads long names and other extensions of a header whole, and expands a gzip a mebibyte of its input at a time: a
file of some megabytes may be gigabytes in memory. Here each header is bounded before it is read, and so is each piece.
"""

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from contracts.errors import InvalidRequest

MOST_MEMBERS = 200
"""Most entries of an archive or a folder."""
PIECE_BYTES = 2**20
"""Bytes that are read at once."""
_EXTENSION_BYTES = 2**16
_MOST_EXTENSIONS = 8
"""Most bytes of a header's extension (a long name, PAX records), and most extensions of one member."""
_MOST_PIECES_BEHIND = 4
"""Most pieces behind the last member: tar fills its last record with zeros."""
_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME,)
_EXTENSIONS = (*_LONG_NAMES, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_OF_MEMBER = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_MOST_DIGITS = 20

Progress = Callable[[int, int], None]
"""Told the bytes read of an archive and its size, in between. It may raise, which ends the reading."""


class Content(Protocol):
    """Bytes that are read in order."""

    def read(self, most: int, /) -> bytes:
        """Return the next bytes, at most ``most``; none at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A regular file of the input."""

    name: str
    size: int
    content: Content


def archive_files(
    archive: Path, most_bytes: int, too_large: InvalidRequest, progress: Progress
) -> Generator[Entry, None, None]:
    """Iterate over the archive's files, each to be read before the next, inside ``readable_archive``.

    Raises ``too_large`` before a member is read with which they are more than ``most_bytes`` or ``MOST_MEMBERS``, and
    ``InvalidRequest`` for other members than files and folders.
    """
    with archive.open("rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        followed = io.BufferedReader(_Followed(raw, progress), PIECE_BYTES)
        stream = gzip.GzipFile(fileobj=followed) if is_gzip else followed
        yield from _files(stream, most_bytes, too_large)
        if is_gzip:
            _check_sum(stream)


@contextmanager
def readable_archive() -> Iterator[None]:
    """Raise ``InvalidRequest`` where what is read inside the context is no archive, and ``OSError`` of the disk."""
    try:
        yield
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # The disk's own, not the archive's.
            raise
        raise InvalidRequest("the archive cannot be read: send a tar, plain or gzip, of the adapter's files") from error


class _Followed(io.RawIOBase):
    """A file whose progress is told as it is read."""

    def __init__(self, raw: BinaryIO, progress: Progress) -> None:
        """Read ``raw`` from where it stands."""
        self._raw, self._progress = raw, progress
        self._size = os.fstat(raw.fileno()).st_size

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill ``buffer`` and return the number of bytes."""
        self._progress(self._raw.tell(), self._size)
        read = self._raw.read(len(buffer))
        buffer[: len(read)] = read
        return len(read)


class _Part:
    """The next ``size`` bytes of a stream."""

    def __init__(self, stream: Content, size: int) -> None:
        """Nothing is read yet."""
        self._stream, self._left = stream, size

    def read(self, most: int, /) -> bytes:
        """Return the next bytes, at most ``most``; none at the end. Raises ``EOFError`` for a stream that ends before."""
        piece = self._stream.read(min(most, self._left))
        if not piece and self._left:
            raise EOFError("the archive is cut short")
        self._left -= len(piece)
        return piece

    def skip(self) -> None:
        """Read on to the end of the part."""
        while self.read(PIECE_BYTES):
            pass


@dataclass(slots=True)
class _Extension:
    """Extensions of the next member's header: its name and size, where they say them."""

    count: int = 0
    name: str | None = None
    size: int | None = None

    def add(self, kind: bytes, body: bytes) -> None:
        """Take note of one extension. Raises ``ValueError`` for one that is malformed."""
        self.count += 1
        if kind in _LONG_NAMES:
            self.name = self.name or body.partition(b"\0")[0].decode(errors="surrogateescape")
        elif kind in _OF_MEMBER:
            self._add_records(body)

    def _add_records(self, body: bytes) -> None:
        while body.strip(b"\0"):
            length = _number(body.partition(b" ")[0])
            record, body = body[:length], body[length:]
            keyword, is_record, value = record.partition(b" ")[2].removesuffix(b"\n").partition(b"=")
            if not is_record:
                raise ValueError("a PAX record has no value")
            if keyword.startswith(b"GNU.sparse"):
                raise _no_plain_file()
            if keyword == b"path":
                self.name = value.decode(errors="surrogateescape")
            elif keyword == b"size":
                self.size = _number(value)


def _files(stream: Content, most_bytes: int, too_large: InvalidRequest) -> Generator[Entry, None, None]:
    total = members = 0
    extension = _Extension()
    for header in _headers(stream):
        if header.type in _EXTENSIONS:
            if extension.count == _MOST_EXTENSIONS or not 0 <= header.size <= _EXTENSION_BYTES:
                raise InvalidRequest(f"the archive holds a header of more than {_EXTENSION_BYTES} bytes")
            extension.add(header.type, _whole(stream, header.size))
            continue
        name = header.name if extension.name is None else extension.name
        size = header.size if extension.size is None else extension.size
        extension = _Extension()
        if size < 0:
            raise ValueError("a member has a negative size")
        total, members = total + size, members + 1
        if members > MOST_MEMBERS or total > most_bytes:
            raise too_large
        _check_name(name)
        if header.type == tarfile.DIRTYPE:
            continue
        if header.type not in _FILES:
            raise _no_plain_file()
        content = _Part(stream, size)
        yield Entry(name, size, content)
        content.skip()
        _Part(stream, -size % tarfile.BLOCKSIZE).skip()


def _check_sum(stream: Content) -> None:
    """Read a gzip on to its end, where its checksum is. Raises ``OSError`` for another one, ``InvalidRequest`` for a far end."""
    for _ in range(_MOST_PIECES_BEHIND):
        if not stream.read(PIECE_BYTES):
            return
    raise InvalidRequest(
        f"the archive goes on for more than {_MOST_PIECES_BEHIND * PIECE_BYTES} bytes behind its files"
    )


def _headers(stream: Content) -> Iterator[tarfile.TarInfo]:
    """Iterate over the headers' blocks, until one of zeros or the stream's end. Raises ``tarfile.HeaderError``."""
    is_first = True
    while block := _up_to(stream, tarfile.BLOCKSIZE):
        if not block.strip(b"\0") and not is_first:
            return
        yield tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        is_first = False
    if is_first:
        raise EOFError("the archive is empty")


def _whole(stream: Content, size: int) -> bytes:
    """Return ``size`` bytes; the rest of their last block is skipped."""
    padded = size + -size % tarfile.BLOCKSIZE
    body = _up_to(stream, padded)
    if len(body) < padded:
        raise EOFError("the archive is cut short")
    return body[:size]


def _up_to(stream: Content, size: int) -> bytes:
    """Return the next ``size`` bytes, fewer at the stream's end only."""
    body = b""
    while len(body) < size and (piece := stream.read(size - len(body))):
        body += piece
    return body


def _number(digits: bytes) -> int:
    """Return a number over 0 or 0. Raises ``ValueError``."""
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        raise ValueError("a PAX record has no length or size")
    return int(digits)


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\x00" in name:
        raise InvalidRequest(f"the archive holds the path {name[:100]!r}, which leads out of it")


def _no_plain_file() -> InvalidRequest:
    return InvalidRequest("the archive holds a link or a device; only plain files are taken")
