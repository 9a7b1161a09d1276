"""The one protocol of a sampling replica: torch in this process, or vLLM over HTTP.

A replica draws sequences from a prompt and streams their tokens. It knows versions of adapters, not runs, gates or
tenants; a request that is cut is gone on with by a new request whose prompt holds the tokens so far.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from contracts.operations import TopkLogprobs


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """Weights that never change: an immutable PEFT ``directory`` under its own ``name``."""

    name: str
    directory: Path


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """What to report of the prompt's own tokens from position ``start`` (at least 1) on."""

    start: int
    logprobs: bool
    topk: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """``len(seeds)`` sequences to draw from one prompt, int64 (P,), P >= 1.

    ``request_id`` is of this attempt alone. ``seeds`` are one for each sequence, None for a fresh one. A sequence ends
    with one of ``stop_tokens``, included, or after ``max_tokens``. Reported logprobs are those of the unscaled model
    distribution. ``topk``: how many likeliest tokens to report with each token. ``adapter`` None samples from the bare
    base. Requests with different ``cache_salt`` share no prefix cache. ``tokens_at_a_time``: so many tokens of a sequence
    may be reported together, but for its first, which comes at once; a replica may report sooner.
    """

    request_id: str
    prompt: NDArray[np.int64]
    seeds: tuple[int | None, ...]
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    topk: int = 0
    scoring: PromptScoring | None = None
    adapter: AdapterVersion | None = None
    cache_salt: str | None = None
    tokens_at_a_time: int = 1


@dataclass(frozen=True, slots=True)
class PromptScored:
    """``logprobs`` float32 (P,), NaN at 0 and before the asked start; ``topk`` of length P; None what was not asked."""

    logprobs: NDArray[np.float32] | None
    topk: TopkLogprobs | None


@dataclass(frozen=True, slots=True)
class NewToken:
    """The next token of sequence ``index``; ``topk`` holds ids int32 (k,) and logprobs float32 (k,), likeliest first."""

    index: int
    token: int
    logprob: float
    topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None


EndReason = Literal["stop", "length", "cut"]


@dataclass(frozen=True, slots=True)
class Ended:
    """Sequence ``index`` has no further events. ``cut``: by ``SamplerReplica.cut``, it could have gone on."""

    index: int
    reason: EndReason


GenerateEvent = PromptScored | NewToken | Ended


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """``running`` sequences decode now, ``waiting`` requests have not begun; ``adapters`` are the resident names."""

    alive: bool
    running: int
    waiting: int
    adapters: tuple[str, ...]


class SamplerReplica(Protocol):
    """Generates from the base and from any number of adapter versions, which it loads on demand."""

    @property
    def name(self) -> str:
        """What people and logs call it."""

    async def start(self) -> None:
        """Make ready; call once, before anything else."""

    async def close(self) -> None:
        """Fail whatever is outstanding with ``EngineFailure`` and free the resources; safe to repeat."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[GenerateEvent]]:
        """Stream the events of ``request`` until every sequence has ended; leaving the generator early aborts it.

        Prompt scores, where asked, come before any token. Raises ``InvalidRequest`` for what the caller must change,
        ``EngineFailure`` when the replica cannot go on: the tokens so far are good.
        """

    async def cut(self, request_id: str, index: int | None = None) -> bool:
        """End a sequence of a request, or all of them, where they are: ``Ended`` with ``cut``, after every token made.

        Returns once that is certain. False when no such request is outstanding. Raises ``EngineFailure`` when the
        replica does not confirm it.
        """

    async def load(self, version: AdapterVersion) -> None:
        """Make ``version`` resident ahead of its first request. Raises as ``generate`` does."""

    async def unload(self, name: str) -> None:
        """Forget the resident version called ``name``; requests that already use it end undisturbed."""

    async def sleep(self) -> None:
        """Give the accelerator's memory back; what still runs is cut. Raises ``WeftError`` when that cannot be."""

    async def wake_up(self) -> None:
        """End a sleep; harmless without one. Raises ``EngineFailure``."""

    async def health(self) -> ReplicaHealth:
        """What the replica is doing. Never raises: what does not answer is not alive."""
