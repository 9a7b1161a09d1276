"""Messages between a process that samples and the process of its trainer's forward: length-prefixed msgpack over pipes."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from contracts.base_model import BaseModelFacts
from contracts.operations import TopkLogprobs
from engine.sampling.replica import AdapterVersion, PromptScored, PromptScoring
from engine.sampling.trainer_forward import HandshakeAdapters

LENGTH_BYTES = 8
TOKEN_BYTES = 8
"""Bytes of a token in ``Score.prompt``."""


class Load(msgspec.Struct, tag=True):
    """First message: the base to load. It has no answer."""

    facts: BaseModelFacts
    dtype: str


class Score(msgspec.Struct, tag=True):
    """Request for a prompt's scores; ``prompt``: int64, little-endian. The answer is ``Scored`` or ``Refused``."""

    adapter: AdapterVersion | None
    prompt: bytes
    scoring: PromptScoring


class WriteAdapters(msgspec.Struct, tag=True):
    """Request for a handshake's adapters. The answer is ``Written`` or ``Refused``."""

    folder: str
    rank: int
    with_head: bool


Request = Load | Score | WriteAdapters


class Scored(msgspec.Struct, tag=True):
    """Scores of a prompt, each an array's bytes: float32 (P,), int32 (P, k), float32 (P, k)."""

    logprobs: bytes | None
    topk_ids: bytes | None
    topk_logprobs: bytes | None

    @classmethod
    def of(cls, found: PromptScored) -> "Scored":
        """Return the message of ``found``."""
        return cls(
            None if found.logprobs is None else found.logprobs.tobytes(),
            None if found.topk is None else found.topk.token_ids.tobytes(),
            None if found.topk is None else found.topk.logprobs.tobytes(),
        )

    def scores(self, topk: int) -> PromptScored:
        """Return the scores of a request for ``topk`` likeliest tokens."""
        likeliest = None
        if self.topk_ids is not None and self.topk_logprobs is not None:
            ids = np.frombuffer(self.topk_ids, np.int32).reshape(-1, topk)
            likeliest = TopkLogprobs(ids, np.frombuffer(self.topk_logprobs, np.float32).reshape(-1, topk))
        return PromptScored(None if self.logprobs is None else np.frombuffer(self.logprobs, np.float32), likeliest)


class Written(msgspec.Struct, tag=True):
    """Adapters of a handshake that have been written."""

    adapters: HandshakeAdapters


class Refused(msgspec.Struct, tag=True):
    """Error of a request; ``is_callers``: it is an ``InvalidRequest``, else an ``EngineFailure``."""

    message: str
    is_callers: bool


Answer = Scored | Written | Refused
_ENCODER = msgspec.msgpack.Encoder(enc_hook=str)
_REQUESTS = msgspec.msgpack.Decoder(Request, dec_hook=lambda kind, value: kind(value))
_ANSWERS = msgspec.msgpack.Decoder(Answer, dec_hook=lambda kind, value: kind(value))


def frame(message: Request | Answer) -> bytes:
    """Return the message's bytes, with their length before them."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def read_request(body: bytes) -> Request:
    """Decode a request. Raises ``msgspec.MsgspecError``."""
    found: Request = _REQUESTS.decode(body)
    return found


def read_answer(body: bytes) -> Answer:
    """Decode an answer. Raises ``msgspec.MsgspecError``."""
    found: Answer = _ANSWERS.decode(body)
    return found


def prompt_bytes(prompt: NDArray[np.int64]) -> bytes:
    """Return the bytes of ``Score.prompt``."""
    return np.ascontiguousarray(prompt, dtype="<i8").tobytes()
