"""Sample reports: the replicas, weight versions and times behind a sample, which weft's own API shows."""

from dataclasses import dataclass
from typing import Any, Self

import msgspec


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a sequence and the ``version`` that produced them, None for the bare base."""

    version: str | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """Report of one sequence. ``spans`` are contiguous from 0. ``stop_reason`` can be ``abort``, which the wire lacks."""

    stop_reason: str
    spans: list[VersionSpan]


@dataclass(frozen=True, slots=True)
class SampleReport:
    """Report of a sample.

    - ``replicas``: in the order of use.
    - ``attempts``: number of dispatches to a replica.
    - ``queue_seconds``: time without a working replica, because of closed gates, full replicas or loads of adapters.
    - ``decode_seconds``: time in which a replica worked on the sample.
    - ``scored_version``: version that scored the prompt; None for the bare base, or if nothing was scored.
    """

    sequences: list[SequenceReport]
    replicas: list[str]
    attempts: int
    queue_seconds: float
    decode_seconds: float
    scored_version: str | None = None

    def versions(self) -> list[str | None]:
        """Return every version used, in order of first use."""
        return list(dict.fromkeys(span.version for sequence in self.sequences for span in sequence.spans))


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """A report without its spans, a thousand times smaller for a sample of many sequences.

    - ``stop_reasons``: of each sequence. ``versions``: see ``SampleReport.versions``.
    """

    stop_reasons: list[str]
    versions: list[str | None]
    attempts: int
    queue_seconds: float
    decode_seconds: float

    @classmethod
    def of(cls, report: SampleReport) -> Self:
        """Return the summary of a report."""
        reasons = [one.stop_reason for one in report.sequences]
        return cls(reasons, report.versions(), report.attempts, report.queue_seconds, report.decode_seconds)


def encode_report(report: SampleReport) -> bytes:
    """Encode the report as msgpack."""
    return msgspec.msgpack.encode(report)


def decode_report(body: bytes) -> SampleReport:
    """Decode a report. Raises ``msgspec.DecodeError``."""
    decoded: Any = msgspec.msgpack.decode(body, type=SampleReport)
    report: SampleReport = decoded
    return report
