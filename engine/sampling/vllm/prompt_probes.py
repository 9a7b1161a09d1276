"""Scores of other tokens than the prompt's own, and draws at its positions, which vLLM does not report with a prompt.

Each comes from a request for one token after the prompt's beginning, whose prefix the server has cached by then. A target is
the only token that its request allows; the reported logprob is of the whole distribution all the same. vLLM's
``logprob_token_ids`` would need one request for several targets, but takes the likeliest tokens of all other requests in the
batch away. Each draw is a request of its own, too: one with ``n`` sequences would hold one place and fill many.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from contracts.errors import EngineFailure
from contracts.prompt_cells import PromptAltTokens
from engine.sampling.replica import GenerateRequest, PromptScored, PromptScoring
from engine.sampling.vllm.logprobs import checked
from engine.sampling.vllm.messages import Drawn

AT_ONCE = 16
"""Most probes of one request on the server at a time, and of one for which the trainer's forward is at hand."""

_COMPUTED = 16
"""Prompt tokens that a probe may have computed although the server has cached its prefix: those of a block that is not full."""

Ask = Callable[[int, int, dict[str, Any]], Awaitable[Drawn]]
"""Asks for one token after the first so many of the prompt's, of which so many have to be computed, with these parameters."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A request for one token at ``position``: the target of number ``target``, or alternative ``draw`` if that is None."""

    position: int
    target: int | None = None
    draw: int = 0


class PromptProbes:
    """The probes of one request's prompt. Call ``run`` once."""

    def __init__(self, request: GenerateRequest, scoring: PromptScoring, ask: Ask) -> None:
        self._request = request
        self._scoring = scoring
        self._ask = ask
        self._targets = None if scoring.targets is None else np.zeros(len(scoring.targets[0]), np.float32)
        shape = (max(0, len(request.prompt) - 1), scoring.alternatives)
        self._alternatives = (
            PromptAltTokens(np.zeros(shape, np.int64), np.zeros(shape, np.float32)) if scoring.alternatives else None
        )
        self.cached: int | None = None
        """Prompt tokens that the server had cached before the first probe; None if no probe was sent."""

    async def run(self, scored: PromptScored) -> PromptScored:
        """Return ``scored`` with the probes' results. Raises ``EngineFailure`` and ``InvalidRequest``."""
        probes = self._probes()
        # The longest first and alone: it has the server cache the others' prompts.
        first = next(probes, None)
        if first is not None:
            await self._take(first, computed=first.position)
            await self._take_all(probes)
        return PromptScored(scored.logprobs, scored.topk, self._targets, self._alternatives)

    async def _take_all(self, probes: Iterator[_Probe]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._work(probes))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _work(self, probes: Iterator[_Probe]) -> None:
        for probe in probes:
            await self._take(probe, computed=min(probe.position, _COMPUTED))

    def _probes(self) -> Iterator[_Probe]:
        """Yield all probes, the longest prompts first."""
        positions = () if self._scoring.targets is None else self._scoring.targets[0].tolist()
        left = len(positions)
        for position in range(len(self._request.prompt) - 1, 0, -1):
            while left and positions[left - 1] == position:
                left -= 1
                yield _Probe(position, left)
            # All greedy choices are the same.
            draws = min(self._scoring.alternatives, 1) if self._is_greedy else self._scoring.alternatives
            for draw in range(draws):
                yield _Probe(position, draw=draw)

    @property
    def _is_greedy(self) -> bool:
        return self._request.temperature == 0

    async def _take(self, probe: _Probe, *, computed: int) -> None:
        answer = await self._ask(probe.position, computed, self._params(probe))
        if self.cached is None:
            self.cached = answer.cached
        tokens = [token for choice in answer.choices for token in choice.token_ids or ()]
        if len(tokens) != 1:
            raise EngineFailure("the replica did not draw the one token that it was asked to")
        score = checked(answer.choices[0].first_logprob)
        if probe.target is not None and self._targets is not None and self._scoring.targets is not None:
            if tokens[0] != self._scoring.targets[1][probe.target]:
                raise EngineFailure("the replica did not score the token that it was asked to")
            self._targets[probe.target] = score
        elif self._alternatives is not None:
            which = slice(None) if self._is_greedy else probe.draw
            self._alternatives.tokens[probe.position - 1, which] = tokens[0]
            self._alternatives.logprobs[probe.position - 1, which] = score

    def _params(self, probe: _Probe) -> dict[str, Any]:
        params: dict[str, Any] = {"max_tokens": 1, "detokenize": False, "ignore_eos": True, "logprobs": 0}
        if probe.target is not None and self._scoring.targets is not None:
            return params | {"temperature": 0, "allowed_token_ids": [int(self._scoring.targets[1][probe.target])]}
        seed = None if self._is_greedy else _seed(self._request.seeds[0], probe)
        return params | {"temperature": self._request.temperature, "seed": seed}


def _seed(seed: int | None, probe: _Probe) -> int | None:
    """Return a seed of the draw's own, as ``segment_seed`` makes one for each segment of a sequence."""
    if seed is None:
        return None
    digest = blake2b(f"{seed}/alternative/{probe.position}/{probe.draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
