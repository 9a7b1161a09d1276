"""Binary encoding of payloads and results: msgpack with sorted keys, arrays as raw little-endian buffers.

Integers that fit take 4 bytes in place of 8, as every token id does. Payloads are compressed as well.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard

from contracts.operations import PAYLOAD_TYPES, RESULT_TYPES, OperationKind, Payload, Result

_COMPRESSED_FROM = 512
"""Bytes from which compression gains more than its frame costs."""
_LEVEL = 1
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
"""Beginning of every zstd frame. No record begins with it: msgpack begins a map with another byte."""
_DIGEST_VERSION = b"\x02"
_NARROW = np.iinfo(np.uint32)
T = TypeVar("T")


def encode(record: Payload | Result) -> bytes:
    """Encode ``record``. Raises ``NotImplementedError`` for a field type that no contract has."""
    return msgspec.msgpack.encode(record, enc_hook=_encode_array, order="sorted")


def pack(record: Payload) -> bytes:
    """Encode ``record`` and compress it when it is large enough to gain by that."""
    encoded = encode(record)
    return encoded if len(encoded) < _COMPRESSED_FROM else zstandard.compress(encoded, _LEVEL)


def encoded_bytes(packed: bytes) -> int:
    """Return the size of a packed record before compression."""
    return max(len(packed), zstandard.frame_content_size(packed) if packed.startswith(_ZSTD_MAGIC) else 0)


def decode_payload(kind: OperationKind, body: bytes) -> Payload:
    """Decode a payload of ``kind``, packed or only encoded. Arrays are read-only. Raises ``ValueError``."""
    return _decoded(kind, body, PAYLOAD_TYPES)


def decode_result(kind: OperationKind, body: bytes) -> Result:
    """Decode a result of ``kind``. Arrays are read-only. Raises ``ValueError``."""
    return _decoded(kind, body, RESULT_TYPES)


def _decoded(kind: OperationKind, body: bytes, types: Mapping[OperationKind, type[T]]) -> T:
    expected = types.get(kind)
    if expected is None:
        raise ValueError(f"no record of the kind {kind}")
    try:
        return msgspec.msgpack.decode(_expanded(body), type=expected, dec_hook=_decode_array)
    except (msgspec.MsgspecError, zstandard.ZstdError, TypeError, OverflowError, NotImplementedError) as error:
        raise ValueError(f"a {kind} cannot be decoded: {error}") from error


def request_digest(kind: OperationKind, body: bytes) -> bytes:
    """Return the 17 bytes that tell a repeated request from a conflicting one: a version, then the body's BLAKE2b digest.

    ``body`` is what the client sent, uncompressed: a newer version that reads it in another way gives the same digest.
    """
    return _DIGEST_VERSION + hashlib.blake2b(body, key=kind.encode(), digest_size=16).digest()


def is_conflict(stored: bytes, digest: bytes) -> bool:
    """Return whether two digests are of different requests. Digests of different versions cannot be compared: no conflict."""
    return stored != digest and stored[:-16] == digest[:-16]


def _expanded(body: bytes) -> bytes:
    return zstandard.decompress(body) if body.startswith(_ZSTD_MAGIC) else body


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        stored = _narrow(value)
        little = np.ascontiguousarray(stored, dtype=stored.dtype.newbyteorder("<"))
        return (value.dtype.newbyteorder("<").str, little.shape, little.tobytes(), little.dtype.str)
    raise NotImplementedError(f"no binary form for {type(value).__name__}")


def _narrow(value: np.ndarray) -> np.ndarray:
    """Return an int64 array as uint32 if every number fits."""
    if value.dtype != np.int64 or not value.size or value.min() < 0 or value.max() > _NARROW.max:
        return value
    return value.astype(np.uint32)


def _decode_array(expected: type, value: Any) -> Any:
    if expected is np.ndarray:
        # Records of earlier versions name no stored dtype: it is the array's own.
        dtype, shape, data, *stored = value
        found = np.frombuffer(data, dtype=np.dtype(stored[0] if stored else dtype)).reshape(shape)
        if found.dtype == np.dtype(dtype):
            return found
        widened = found.astype(np.dtype(dtype))
        widened.flags.writeable = False
        return widened
    raise NotImplementedError(f"no binary form for {expected.__name__}")
