"""Records of samples that training may name later, and the spans of training data that name them."""

from dataclasses import dataclass

import msgspec
import numpy as np
import zstandard

from contracts.operations import SampleOutput, SampleRequest
from contracts.provenance_spans import Span

MOST_RECORD_BYTES = 16 * 2**20
"""Largest record before it is compressed. A token of the prompt takes 4 bytes, and a sampled one 8."""
HEADER_BYTES = 18
"""Bytes at a record's beginning that tell its size: zstd's longest frame header."""
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A sample's prompt, int32 (P,), and each sequence's tokens int32 (T,) with their logprobs float32 (T,)."""

    prompt: np.ndarray
    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]

    def of(self, span: Span, sequence: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the span's tokens int32 and logprobs float32, 0 for a prompt's; None if the record has no such span."""
        if not 0 <= sequence < len(self.tokens):
            return None
        tokens = self.tokens[sequence] if span.is_sampled else self.prompt
        end = span.offset + span.length
        if end > len(tokens):
            return None
        some = tokens[span.offset : end]
        logprobs = self.logprobs[sequence][span.offset : end] if span.is_sampled else np.zeros(len(some), np.float32)
        return some, logprobs


class _Packed(msgspec.Struct, array_like=True):
    prompt: bytes
    tokens: list[bytes]
    logprobs: list[bytes]


def encode_sample_record(request: SampleRequest, output: SampleOutput) -> bytes | None:
    """Encode the record of a sample and its result; None for one of more than ``MOST_RECORD_BYTES``."""
    sampled = sum(len(sequence.tokens) + len(sequence.logprobs) for sequence in output.sequences)
    if 4 * (len(request.prompt) + sampled) > MOST_RECORD_BYTES:
        return None
    packed = _Packed(
        request.prompt.astype("<i4").tobytes(),
        [sequence.tokens.astype("<i4").tobytes() for sequence in output.sequences],
        [sequence.logprobs.astype("<f4").tobytes() for sequence in output.sequences],
    )
    return zstandard.compress(msgspec.msgpack.encode(packed), _LEVEL)


def decoded_bytes(beginning: bytes) -> int:
    """Return the size that a record has once decompressed, of its first ``HEADER_BYTES``. Raises ``ValueError``."""
    try:
        size = int(zstandard.frame_content_size(beginning))
    except zstandard.ZstdError as error:
        raise ValueError("not the record of a sample") from error
    if size < 0:
        raise ValueError("the record of a sample does not tell its size")
    return size


def decode_sample_record(body: bytes) -> SampleRecord:
    """Decode a record. Raises ``ValueError`` for bytes that are none."""
    try:
        packed = msgspec.msgpack.decode(zstandard.decompress(body), type=_Packed)
    except (msgspec.MsgspecError, zstandard.ZstdError) as error:
        raise ValueError("not the record of a sample") from error
    return SampleRecord(
        np.frombuffer(packed.prompt, "<i4"),
        [np.frombuffer(tokens, "<i4") for tokens in packed.tokens],
        [np.frombuffer(logprobs, "<f4") for logprobs in packed.logprobs],
    )
