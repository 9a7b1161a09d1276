"""Handshake with a replica before it takes work: the sampler must sample what the trainer trained.

The replica draws and scores tokens of the bare base, and of a random adapter on every projection, in one batch. The
trainer's code scores the same tokens. If the two differ by more than the tolerance, adapters on one kind of projection each
tell which is off.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from contracts.errors import EngineFailure
from engine.sampling.replica import (
    AdapterVersion,
    GenerateRequest,
    NewToken,
    PromptScored,
    PromptScoring,
    SamplerReplica,
)
from engine.sampling.trainer_forward import HandshakeAdapter, HandshakeAdapters, TrainerForward

TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-3})
"""Largest mean distance of log-probabilities by the base's data type, in nats a token."""
HALF_PRECISION = 0.1
"""The same of every other data type."""
HANDSHAKE_RANK = 4
SECONDS = 300.0
"""Longest draw of a replica in its handshake. The trainer's forward has a deadline of its own."""
_PROMPTS, _PROMPT_TOKENS, _DRAWN_TOKENS = 2, 8, 8
_BARE = "the base model itself"
_SCORE = PromptScoring(start=1, logprobs=True, topk=0)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Difference:
    """Mean distances from the trainer's log-probabilities, in nats: of drawn tokens and of the prompt's scores."""

    drawn: float
    scored: float

    @property
    def largest(self) -> float:
        """The larger of the two; infinite where a number is missing."""
        worst = max(self.drawn, self.scored)
        return worst if np.isfinite(worst) else float("inf")


class Handshake:
    """Comparison of replicas of one base with the trainer's forward."""

    def __init__(
        self,
        forward: TrainerForward,
        folder: Path,
        *,
        vocabulary_size: int,
        max_rank: int,
        with_head: bool,
        tolerance: float | None = None,
        scores: bool = True,
    ) -> None:
        """``folder``: where the adapters go; replicas must see it. ``tolerance`` None: by the base's data type.

        Without ``scores`` the replicas' prompt scores are not compared: they are the trainer's own.
        """
        self._forward = forward
        self._vocabulary = vocabulary_size
        self._folder = folder.absolute()
        self._rank = min(HANDSHAKE_RANK, max_rank)
        self._with_head = with_head
        self._tolerance = tolerance
        self._scoring = _SCORE if scores else None

    def held(self) -> AbstractContextManager[None]:
        """Keep the trainer's forward ready inside the context, from ``prepare`` to ``run``."""
        return self._forward.held()

    async def prepare(self) -> HandshakeAdapters:
        """Write the adapters. Takes as long as the trainer's forward takes to load the base. Raises ``WeftError``."""
        return await self._forward.handshake_adapters(self._folder, rank=self._rank, with_head=self._with_head)

    def check(self) -> None:
        """Raise ``ProcessMustEnd`` when the device of the trainer's forward has failed."""
        self._forward.check()

    async def close(self) -> None:
        """Close the trainer's forward."""
        await self._forward.close()

    async def run(self, replica: SamplerReplica, adapters: HandshakeAdapters) -> None:
        """Compare ``replica`` with the trainer. Raises ``EngineFailure`` naming the projections that are off."""
        started = monotonic()
        try:
            await self._compare(replica, adapters)
        finally:
            for adapter in adapters.adapters:
                await replica.unload(adapter.version.name)
        log.info("replica %s passed its handshake in %.1f s", replica.name, monotonic() - started)

    async def _compare(self, replica: SamplerReplica, adapters: HandshakeAdapters) -> None:
        tolerance = self._tolerance or TOLERANCES.get(adapters.dtype, HALF_PRECISION)
        whole, *parts = adapters.adapters
        bare, adapted = await asyncio.gather(*(self._difference(replica, one) for one in (None, whole.version)))
        log.info(
            "replica %s differs from the trainer by %.1e nats a token on the base and %.1e on a random adapter",
            *(replica.name, bare.largest, adapted.largest),
        )
        if max(bare.largest, adapted.largest) <= tolerance:
            return
        if bare.largest > tolerance:
            found = {_BARE: bare}
            advice = f"it must serve the trainer's weights, in the trainer's data type ({adapters.dtype})"
        else:
            found = await self._blamed(replica, parts, tolerance) or {"all projections together": adapted}
            advice = "adapters on them would be sampled otherwise than they were trained"
        raise EngineFailure(
            f"replica {replica.name} takes no work, because it does not compute what the trainer computes: "
            f"{', '.join(f'{name} is off by {_told(off)}' for name, off in found.items())} (tolerance: {tolerance:g} nats a "
            f"token); {advice}"
        )

    async def _blamed(
        self, replica: SamplerReplica, parts: Sequence[HandshakeAdapter], tolerance: float
    ) -> dict[str, _Difference]:
        """Return the differences beyond the tolerance by projection, with an adapter on one kind of projection each."""
        differences = {part.projection: await self._difference(replica, part.version) for part in parts}
        return {name: found for name, found in differences.items() if found.largest > tolerance}

    async def _difference(self, replica: SamplerReplica, version: AdapterVersion | None) -> _Difference:
        chance = np.random.default_rng(7)
        prompts = [chance.integers(0, self._vocabulary, _PROMPT_TOKENS) for _ in range(_PROMPTS)]
        found = await asyncio.gather(*(self._of_prompt(replica, version, prompt) for prompt in prompts))
        return _Difference(*(float(np.mean(np.concatenate(parts))) for parts in zip(*found, strict=True)))

    async def _of_prompt(
        self, replica: SamplerReplica, version: AdapterVersion | None, prompt: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the distances of drawn tokens (T,) and of the prompt's tokens after the first (P - 1,).

        Zeros stand for scores that are not compared.
        """
        try:
            async with asyncio.timeout(SECONDS):
                drawn, scored = await self._draw(replica, version, prompt)
        except TimeoutError as error:
            raise EngineFailure(f"replica {replica.name} did not draw in {SECONDS:.0f} s in its handshake") from error
        tokens = np.concatenate([prompt, [token.token for token in drawn]])
        expected = await self._forward.score(version, tokens, _SCORE, first=True)
        if expected.logprobs is None:
            raise EngineFailure("the trainer's forward gave no scores in a handshake")
        off_drawn = np.abs(expected.logprobs[len(prompt) :] - np.array([one.logprob for one in drawn], np.float32))
        if self._scoring is None:
            return off_drawn, np.zeros(len(prompt) - 1, np.float32)
        if scored is None or scored.logprobs is None:
            raise EngineFailure(f"replica {replica.name} gave no scores in its handshake")
        return off_drawn, np.abs(expected.logprobs[1 : len(prompt)] - scored.logprobs[1:])

    async def _draw(
        self, replica: SamplerReplica, version: AdapterVersion | None, prompt: NDArray[np.int64]
    ) -> tuple[list[NewToken], PromptScored | None]:
        request = GenerateRequest(
            f"handshake-{uuid4().hex}", prompt, (1,), max_tokens=_DRAWN_TOKENS, scoring=self._scoring, adapter=version
        )
        drawn: list[NewToken] = []
        scored: PromptScored | None = None
        async with aclosing(replica.generate(request)) as batches:
            async for events in batches:
                drawn += [event for event in events if isinstance(event, NewToken)]
                scored = next((event for event in events if isinstance(event, PromptScored)), scored)
        return drawn, scored


def _told(off: _Difference) -> str:
    where = "the tokens it draws" if off.drawn >= off.scored else "its prompt scores"
    return f"{off.largest:.2g} in {where}"
