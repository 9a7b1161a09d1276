import tracemalloc

import pytest
import zstandard
from starlette.requests import Request

from api.wire.body import KEPT_OF_TOO_LARGE, OversizedBody, expanded
from api.wire.body import read_body as read_raw
from contracts.errors import InvalidRequest, PayloadTooLarge

LIMIT = 1_000_000


def request_of(*pieces: bytes, encoding: str | None = None) -> Request:
    """A request whose body arrives in ``pieces``."""
    messages = iter(
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, start=1)
    )

    async def receive() -> dict[str, object]:
        return next(messages)

    headers = [] if encoding is None else [(b"content-encoding", encoding.encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, expanded."""
    return expanded(await read_raw(request, limit, idle_seconds=10), limit)


def compressed(body: bytes, **options: int) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(body)


@pytest.mark.parametrize("encoding", [None, "identity", " Identity "])
async def test_a_plain_body_arrives(encoding: str | None) -> None:
    assert await read_body(request_of(b"ab", b"", b"c", encoding=encoding), LIMIT) == b"abc"


@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 3000])
async def test_a_zstd_body_arrives(body: bytes) -> None:
    packed = compressed(body)
    middle = len(packed) // 2
    assert await read_body(request_of(packed[:middle], packed[middle:], encoding="zstd"), LIMIT) == body


async def test_a_zstd_frame_that_does_not_tell_its_size_arrives() -> None:
    compressor = zstandard.ZstdCompressor().compressobj()
    packed = compressor.compress(b"hello") + compressor.flush()
    assert await read_body(request_of(packed, encoding="zstd"), LIMIT) == b"hello"


async def test_the_limit_itself_is_allowed() -> None:
    body = bytes(LIMIT)
    assert len(await read_body(request_of(body), LIMIT)) == LIMIT
    assert len(await read_body(request_of(compressed(body), encoding="zstd"), LIMIT)) == LIMIT


@pytest.mark.parametrize("pieces", [(b"a" * (LIMIT + 1),), (b"a" * LIMIT, b"a"), (b"a",) * 20 + (b"a" * LIMIT,)])
async def test_over_the_limit_is_refused_with_its_beginning(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(OversizedBody, match=str(LIMIT)) as refused:
        await read_body(request_of(*pieces), LIMIT)
    assert isinstance(refused.value, PayloadTooLarge)
    assert refused.value.beginning == b"a" * KEPT_OF_TOO_LARGE


@pytest.mark.parametrize("pieces", [(bytes(5000),), (bytes(1001), bytes(3999))])
async def test_the_beginning_does_not_depend_on_how_the_body_was_cut(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(OversizedBody) as refused:
        await read_body(request_of(*pieces), 1000)
    assert refused.value.beginning == bytes(1000)


@pytest.mark.parametrize("level", [1, 19])
async def test_a_zstd_bomb_is_refused_without_being_expanded(level: int) -> None:
    compressor = zstandard.ZstdCompressor(level=level).compressobj()
    bomb = compressor.compress(b"head")
    for _ in range(512):
        bomb += compressor.compress(bytes(2**20))
    bomb += compressor.flush()
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(OversizedBody, match=str(LIMIT)) as refused:
            await read_body(request_of(bomb, encoding="zstd"), LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
    assert refused.value.beginning == b"head" + bytes(KEPT_OF_TOO_LARGE - 4)


async def test_a_zstd_body_over_the_limit_before_expansion_is_refused_with_its_beginning() -> None:
    raw = bytes(range(256)) * 10
    with pytest.raises(OversizedBody) as refused:
        await read_body(request_of(compressed(raw, level=1), b"x" * LIMIT, encoding="zstd"), LIMIT)
    assert refused.value.beginning == raw


@pytest.mark.parametrize("body", [b"", b"not zstd", compressed(bytes(1000))[:-3], compressed(b"x" * 50)[:4]])
async def test_damaged_zstd_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="zstd"):
        await read_body(request_of(body, encoding="zstd"), LIMIT)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, zstd"])
async def test_other_encodings_are_refused(encoding: str) -> None:
    with pytest.raises(InvalidRequest, match="Content-Encoding"):
        await read_body(request_of(b"x", encoding=encoding), LIMIT)


@pytest.mark.parametrize("body", [bytes(64_000_000), bytes(range(256)) * 1_000 + bytes(40_000_000)])
async def test_a_bomb_expands_in_pieces_for_whose_copies_nobody_waits_long(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads stand still while bytes are copied, so the pieces are small, and the whole does not grow by copies."""
    sizes: list[int] = []
    make = zstandard.ZstdDecompressor

    class Watched:
        """Decompressor that notes the sizes of its pieces."""

        def __init__(self, **options: int) -> None:
            self._inner = make(**options).decompressobj()

        def decompressobj(self) -> "Watched":
            return self

        def decompress(self, piece: bytes) -> bytes:
            found = self._inner.decompress(piece)
            sizes.append(len(found))
            return found

        @property
        def eof(self) -> bool:
            return self._inner.eof

    packed = compressed(body, level=19)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", Watched)
    found = await read_body(request_of(packed, encoding="zstd"), 64_000_000)
    assert found == body
    assert max(sizes) <= 8 * 2**20
