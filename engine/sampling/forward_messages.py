"""Messages between a process that samples and the process of its trainer's forward, in msgpack."""

from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from contracts.base_model import BaseModelFacts
from contracts.errors import EngineFailure, FilesUnread, InvalidRequest, WeftError
from contracts.operations import TopkLogprobs
from contracts.prompt_cells import PromptAltTokens
from engine.sampling.replica import AdapterVersion, Draws, PromptScored, PromptScoring
from engine.sampling.trainer_forward import HandshakeAdapters

TOKEN_BYTES = 8
"""Bytes of a token in ``Score.prompt``."""


class Load(msgspec.Struct, tag=True):
    """First message: the base to load. It has no answer."""

    facts: BaseModelFacts
    dtype: str


class Score(msgspec.Struct, tag=True):
    """Request for a prompt's scores; ``prompt``: int64, little-endian. The answer is ``Scored`` or ``Refused``.

    ``positions`` and ``tokens``: the targets of ``scoring``, int64, little-endian; None for none.
    """

    adapter: AdapterVersion | None
    prompt: bytes
    scoring: PromptScoring
    draws: Draws
    positions: bytes | None = None
    tokens: bytes | None = None

    @classmethod
    def of(
        cls, adapter: AdapterVersion | None, prompt: NDArray[np.int64], scoring: PromptScoring, draws: Draws
    ) -> "Score":
        """Return the request for ``prompt``, int64 (P,)."""
        positions, tokens = (None, None) if scoring.targets is None else map(_int64_bytes, scoring.targets)
        return cls(adapter, _int64_bytes(prompt), replace(scoring, targets=None), draws, positions, tokens)

    def asked(self) -> tuple[NDArray[np.int64], PromptScoring]:
        """Return the prompt, and what is asked for."""
        prompt = _int64_array(self.prompt)
        if self.positions is None or self.tokens is None:
            return prompt, self.scoring
        return prompt, replace(self.scoring, targets=(_int64_array(self.positions), _int64_array(self.tokens)))


class WriteAdapters(msgspec.Struct, tag=True):
    """Request for a handshake's adapters. The answer is ``Written`` or ``Refused``."""

    folder: str
    rank: int
    with_head: bool


Request = Load | Score | WriteAdapters


class Scored(msgspec.Struct, tag=True):
    """Scores of a prompt, each an array's bytes.

    - ``logprobs`` float32 (P,), ``topk_ids`` int32 (P, k), ``topk_logprobs`` float32 (P, k), ``targets`` float32 (M,).
    - ``alternatives`` int64 (P - 1, k) and ``alternative_logprobs`` float32 (P - 1, k).
    """

    logprobs: bytes | None
    topk_ids: bytes | None
    topk_logprobs: bytes | None
    targets: bytes | None
    alternatives: bytes | None
    alternative_logprobs: bytes | None

    @classmethod
    def of(cls, found: PromptScored) -> "Scored":
        """Return the message of ``found``."""
        drawn = found.alternatives
        return cls(
            None if found.logprobs is None else found.logprobs.tobytes(),
            None if found.topk is None else found.topk.token_ids.tobytes(),
            None if found.topk is None else found.topk.logprobs.tobytes(),
            None if found.targets is None else found.targets.tobytes(),
            None if drawn is None else drawn.tokens.tobytes(),
            None if drawn is None else drawn.logprobs.tobytes(),
        )

    def scores(self, scoring: PromptScoring) -> PromptScored:
        """Return the scores of a request for ``scoring``."""
        likeliest, drawn = None, None
        if self.topk_ids is not None and self.topk_logprobs is not None:
            ids = np.frombuffer(self.topk_ids, np.int32).reshape(-1, scoring.topk)
            likeliest = TopkLogprobs(ids, np.frombuffer(self.topk_logprobs, np.float32).reshape(-1, scoring.topk))
        if self.alternatives is not None and self.alternative_logprobs is not None:
            tokens = np.frombuffer(self.alternatives, np.int64).reshape(-1, scoring.alternatives)
            logprobs = np.frombuffer(self.alternative_logprobs, np.float32).reshape(-1, scoring.alternatives)
            drawn = PromptAltTokens(tokens, logprobs)
        return PromptScored(
            None if self.logprobs is None else np.frombuffer(self.logprobs, np.float32),
            likeliest,
            None if self.targets is None else np.frombuffer(self.targets, np.float32),
            drawn,
        )


class Written(msgspec.Struct, tag=True):
    """Adapters of a handshake that have been written."""

    adapters: HandshakeAdapters


class Refused(msgspec.Struct, tag=True):
    """Error of a request: ``InvalidRequest`` with ``is_callers``, ``FilesUnread`` with ``is_away``, else ``EngineFailure``."""

    message: str
    is_callers: bool
    is_away: bool = False

    @classmethod
    def of(cls, error: WeftError) -> "Refused":
        """Return the message of ``error``."""
        return cls(error.message, isinstance(error, InvalidRequest), isinstance(error, FilesUnread))

    def error(self) -> WeftError:
        """Return the error."""
        kind = InvalidRequest if self.is_callers else FilesUnread if self.is_away else EngineFailure
        return kind(self.message)


Answer = Scored | Written | Refused
_ENCODER = msgspec.msgpack.Encoder(enc_hook=str)
_REQUESTS = msgspec.msgpack.Decoder(Request, dec_hook=lambda kind, value: kind(value))
_ANSWERS = msgspec.msgpack.Decoder(Answer, dec_hook=lambda kind, value: kind(value))


def message_bytes(message: Request | Answer) -> bytes:
    """Return the message's bytes."""
    return _ENCODER.encode(message)


def read_request(body: bytes) -> Request:
    """Decode a request. Raises ``msgspec.MsgspecError``."""
    found: Request = _REQUESTS.decode(body)
    return found


def read_answer(body: bytes) -> Answer:
    """Decode an answer. Raises ``msgspec.MsgspecError``."""
    found: Answer = _ANSWERS.decode(body)
    return found


def _int64_bytes(numbers: NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(numbers, dtype="<i8").tobytes()


def _int64_array(body: bytes) -> NDArray[np.int64]:
    return np.frombuffer(body, "<i8").astype(np.int64)
