"""Protocol of a sampling replica: draws sequences from a prompt with an adapter, and streams their tokens.

Two implementations: ``in_process.replica.TorchReplica`` computes in weft's own process, ``vllm.replica.VllmReplica`` asks
a vLLM server over HTTP. A replica knows versions of adapters, not runs, gates or tenants. To continue a sequence that
was cut, send a new request whose prompt holds the tokens so far.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from contracts.logit_rules import LogitRules
from contracts.operations import TopkLogprobs
from contracts.prompt_cells import PromptAltTokens


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """Adapter weights that never change: an immutable PEFT folder ``directory`` with a ``name`` of its own."""

    name: str
    directory: Path


def turn_taker(owner: str, adapter: AdapterVersion | None) -> str:
    """Return the name under which work of ``owner`` takes turns; ``owner`` "" stands for the adapter."""
    return owner or ("" if adapter is None else f"adapter:{adapter.name}")


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Scores to report for positions of the prompt.

    - From position ``start`` (at least 1) on: logprobs of the prompt's tokens, and the ``topk`` likeliest.
    - ``targets``: positions (at least 1, ascending) and tokens, int64 (M,) each, whose logprobs are wanted.
    - ``alternatives``: number of tokens to draw at every position from 1 on, independently and at the request's temperature
      alone.
    """

    start: int
    logprobs: bool
    topk: int
    targets: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    alternatives: int = 0

    @property
    def scores_prompt(self) -> bool:
        """True if anything is asked for from ``start`` on."""
        return self.logprobs or self.topk > 0

    def cells(self, length: int) -> int:
        """Return the number of targets and draws at the positions of a prompt of ``length`` tokens."""
        return (0 if self.targets is None else len(self.targets[0])) + (length - 1) * self.alternatives

    def begin(self, length: int) -> int:
        """Return the first position of a prompt of ``length`` tokens that is wanted, ``length`` for none."""
        wanted = [min(self.start, length)] if self.scores_prompt else [length]
        if self.targets is not None and len(self.targets[0]):
            wanted.append(int(self.targets[0][0]))
        if self.alternatives:
            wanted.append(min(1, length))
        return min(wanted)


@dataclass(frozen=True, slots=True)
class Draws:
    """Settings of the draws at a prompt's positions: equal seeds draw the same, and None is a fresh random stream."""

    temperature: float = 1.0
    seed: int | None = None


UNSCALED = Draws()
"""Draws from the model's own distribution."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request for ``len(seeds)`` sequences from one prompt.

    - ``request_id`` is unique to this attempt. ``prompt``: int64 (P,), P >= 1.
    - ``seeds``: one for each sequence, None for a fresh random stream.
    - A sequence ends with one of ``stop_tokens``, included, or after ``max_tokens``.
    - ``topk``: number of likeliest tokens to report with each token. Logprobs are of the unscaled model distribution.
    - ``adapter``: None samples from the bare base.
    - Requests with different ``cache_salt`` share no prefix cache.
    - Requests of different owners take turns by tokens, weighted by ``share``; ``owner`` "" stands for the adapter.
    - ``tokens_at_a_time``: number of a sequence's tokens that may be reported together. The first is reported at once,
      and a replica may report others sooner.
    - ``logit_rules``: they look back on the request's own tokens, not on the prompt's.
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
    owner: str = ""
    share: float = 1.0
    tokens_at_a_time: int = 1
    logit_rules: LogitRules | None = None

    @property
    def draws(self) -> Draws:
        """Settings of the draws at the prompt's positions."""
        return Draws(self.temperature, self.seeds[0])

    @property
    def turn_taker(self) -> str:
        """Name under which the request's sequences and its adapter's load take turns with others'."""
        return turn_taker(self.owner, self.adapter)

    def cost(self, *, is_first: bool) -> int:
        """Return the tokens that a sequence may take: what it draws, and the prompt for the first one of the request."""
        return self.max_tokens + (len(self.prompt) if is_first else 0)


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Prompt scores; None for what is not asked.

    - ``logprobs``: float32 (P,), NaN at 0 and before ``start``. ``topk``: of length P.
    - ``targets``: logprobs of the wanted targets, float32 (M,).
    - ``alternatives``: the drawn tokens with their logprobs.
    """

    logprobs: NDArray[np.float32] | None
    topk: TopkLogprobs | None
    targets: NDArray[np.float32] | None = None
    alternatives: PromptAltTokens | None = None


@dataclass(frozen=True, slots=True)
class PromptCached:
    """Tokens of the prompt that the replica had computed for an earlier request. Of several counts the least is right."""

    tokens: int


@dataclass(frozen=True, slots=True)
class NewToken:
    """Next token of sequence ``index``. ``topk`` holds ids int32 (k,) and logprobs float32 (k,), likeliest first."""

    index: int
    token: int
    logprob: float
    topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None


EndReason = Literal["stop", "length", "cut"]


@dataclass(frozen=True, slots=True)
class Ended:
    """End of sequence ``index``. Reason ``cut``: by ``SamplerReplica.cut``, before a stop token and below its length."""

    index: int
    reason: EndReason


GenerateEvent = PromptScored | PromptCached | NewToken | Ended


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """State of a replica: ``running`` sequences, ``waiting`` requests without a sequence begun, names of loaded ``adapters``.

    ``hangs``: the replica answers and makes no tokens. It stays so until it has drawn one.
    """

    alive: bool
    running: int
    waiting: int
    adapters: tuple[str, ...]
    hangs: bool = False


class SamplerReplica(Protocol):
    """Sampler over one base model and any number of adapter versions, which it loads on demand."""

    @property
    def name(self) -> str:
        """Name of the replica for operators, logs and metrics."""

    async def start(self) -> None:
        """Prepare the replica. Call once, before any other method, on the event loop that will use it."""

    async def close(self) -> None:
        """Fail every outstanding request with ``EngineFailure`` and free the resources. Safe to repeat."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[GenerateEvent]]:
        """Stream the events of ``request`` until every sequence has ended. Closing the generator early aborts the request.

        Prompt scores, if asked for, come before any token. A replica that reuses prompts tells how much of this one it has
        reused. Raises ``InvalidRequest`` for a mistake of the caller's, and
        ``EngineFailure`` when the replica cannot go on; tokens received before the failure are valid.
        """

    async def cut(self, request_id: str, index: int | None = None) -> bool:
        """End one sequence of a request, or all of them, with the tokens made so far.

        Each gets ``Ended`` with reason ``cut`` after its last token. Returns once every such event is in the stream; False when
        no such request is outstanding. Raises ``EngineFailure`` when the replica does not confirm the cut.
        """

    async def load(self, version: AdapterVersion, *, owner: str = "", share: float = 1.0) -> None:
        """Load ``version`` ahead of its first request, in the turns of ``owner`` (see ``GenerateRequest``).

        Raises ``InvalidRequest`` and ``EngineFailure`` as ``generate`` does.
        """

    async def unload(self, name: str) -> None:
        """Drop the loaded version called ``name``, if there is one. Requests that already use it end undisturbed."""

    async def sleep(self) -> None:
        """Free the accelerator's memory; running sequences are cut. Raises ``WeftError`` when the replica cannot sleep."""

    async def wake_up(self) -> None:
        """End a sleep; harmless without one. Raises ``EngineFailure``."""

    async def health(self) -> ReplicaHealth:
        """Return the replica's state: one that does not answer is not alive. Raises only ``ProcessMustEnd``."""
