"""Spans of training data that name where their tokens come from: a sample's prompt, or what was sampled after it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` tokens from ``offset`` on: of what sequence ``sequence_id`` sampled, or of its prompt."""

    sequence_id: str
    offset: int
    length: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Provenance:
    """Spans of one datum: ``tokens`` cover its input tokens, ``targets`` its target tokens, in order and without a gap."""

    tokens: list[Span]
    targets: list[Span]


def sample_of(sequence_id: str) -> tuple[str, int]:
    """Return the request id of a sequence's sample, and the sequence's number in it, -1 for a text that is no such id."""
    request_id, _, number = sequence_id.rpartition(":")
    return request_id, int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1
