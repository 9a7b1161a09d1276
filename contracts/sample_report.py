"""How a sample came about: what weft's own API tells beyond the wire's result."""

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a sequence came from ``version``: a published adapter version, None for the bare base."""

    version: str | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """``stop_reason`` tells an ``abort`` from a ``length``, which the wire cannot; ``spans`` are contiguous from 0."""

    stop_reason: str
    spans: list[VersionSpan]


@dataclass(frozen=True, slots=True)
class SampleReport:
    """``replicas`` in the order they were used; ``attempts`` counts dispatches; times in seconds.

    ``queue_seconds`` is all time in which no replica worked on the sample: gates, full replicas, loads of adapters.
    """

    sequences: list[SequenceReport]
    replicas: list[str]
    attempts: int
    queue_seconds: float
    decode_seconds: float

    def versions(self) -> list[str | None]:
        """Every version used, in order of first use."""
        return list(dict.fromkeys(span.version for sequence in self.sequences for span in sequence.spans))


def encode_report(report: SampleReport) -> bytes:
    """Canonical bytes."""
    return msgspec.msgpack.encode(report)


def decode_report(body: bytes) -> SampleReport:
    """Inverse of ``encode_report``. Raises ``msgspec.DecodeError``."""
    decoded: Any = msgspec.msgpack.decode(body, type=SampleReport)
    report: SampleReport = decoded
    return report
