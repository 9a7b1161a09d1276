"""Text of single tokens: the pieces of a sequence that together are exactly its text, and what is told of each."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from api.openai.text_stream import TextStream
from contracts.operations import SampledSequence
from contracts.sample_report import VersionSpan

_MOST_ALTERNATIVES = 10
"""Likeliest tokens that are told of a place."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token of a sequence. ``top``: text and logprob of the likeliest tokens at its place.

    A character of several tokens is the text of the last of them.
    """

    index: int
    id: int
    text: str
    logprob: float
    version: str | None
    top: list[tuple[str, float]] = field(default_factory=list)


class PieceReader:
    """Pieces of one sequence, as its tokens come."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """``decode`` turns token ids into text."""
        self._decode = decode
        self._text = TextStream(decode, frozenset(), ())
        self._count = 0

    def push(self, tokens: Sequence[int], logprobs: Sequence[float], version: str | None) -> list[TokenPiece]:
        """Return the pieces of the tokens that come next."""
        pieces = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            pieces.append(TokenPiece(self._count, token, self._text.push([token]), logprob, version))
            self._count += 1
        return pieces

    def end(self) -> str:
        """Return the text that belongs to the last token beyond its piece; no token follows."""
        return self._text.end()


def whole_pieces(
    decode: Callable[[list[int]], str], sequence: SampledSequence, spans: Sequence[VersionSpan]
) -> list[TokenPiece]:
    """Return the pieces of a finished sequence's tokens in ``spans``, and their likeliest tokens if it has them.

    The spans begin at the first token.
    """
    most = spans[-1].end if spans else 0
    tokens, logprobs = sequence.tokens[:most].tolist(), sequence.logprobs[:most].tolist()
    reader = PieceReader(decode)
    pieces: list[TokenPiece] = []
    for span in spans:
        pieces += reader.push(tokens[span.start : span.end], logprobs[span.start : span.end], span.version)
    rest = reader.end()
    texts = [piece.text for piece in pieces]
    if texts:
        texts[-1] += rest
    return [
        TokenPiece(one.index, one.id, text, one.logprob, one.version, _likeliest(decode, sequence, one.index))
        for one, text in zip(pieces, texts, strict=True)
    ]


def places_of(sequences: Iterable[Sequence[TokenPiece]]) -> dict[str | None, int]:
    """Return the place of each version in the order of use, which gives it its letter and its colour."""
    versions = dict.fromkeys(piece.version for pieces in sequences for piece in pieces)
    return {version: place for place, version in enumerate(versions)}


def _likeliest(decode: Callable[[list[int]], str], sequence: SampledSequence, place: int) -> list[tuple[str, float]]:
    if sequence.topk_logprobs is None:
        return []
    ids = sequence.topk_logprobs.token_ids[place][:_MOST_ALTERNATIVES].tolist()
    values = sequence.topk_logprobs.logprobs[place][:_MOST_ALTERNATIVES].tolist()
    return [(decode([token]), value) for token, value in zip(ids, values, strict=True)]
