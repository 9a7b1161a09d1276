"""Binary encoding of payloads and results: msgpack with sorted keys, arrays as raw little-endian buffers.

The encoding is canonical: equal records give equal bytes. Its digest tells a repeated request from a conflicting one.
"""

import hashlib
from typing import Any

import msgspec
import numpy as np

from contracts.operations import PAYLOAD_TYPES, RESULT_TYPES, OperationKind, Payload, Result


def encode(record: Payload | Result) -> bytes:
    """Encode ``record``. Raises ``NotImplementedError`` for a field type that no contract has."""
    return msgspec.msgpack.encode(record, enc_hook=_encode_array, order="sorted")


def decode_payload(kind: OperationKind, body: bytes) -> Payload:
    """Decode a payload of ``kind``. Arrays are read-only views of ``body``. Raises ``msgspec.DecodeError``."""
    return msgspec.msgpack.decode(body, type=PAYLOAD_TYPES[kind], dec_hook=_decode_array)


def decode_result(kind: OperationKind, body: bytes) -> Result:
    """Decode a result of ``kind``. Arrays are read-only views of ``body``. Raises ``msgspec.DecodeError``."""
    return msgspec.msgpack.decode(body, type=RESULT_TYPES[kind], dec_hook=_decode_array)


def digest(record: Payload) -> bytes:
    """Return the 16-byte BLAKE2b digest of the canonical encoding."""
    return hashlib.blake2b(encode(record), digest_size=16).digest()


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
        return (little.dtype.str, little.shape, little.tobytes())
    raise NotImplementedError(f"no binary form for {type(value).__name__}")


def _decode_array(expected: type, value: Any) -> Any:
    if expected is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
    raise NotImplementedError(f"no binary form for {expected.__name__}")
