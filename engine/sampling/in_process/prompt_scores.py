"""Scores at the positions of a prompt, gathered chunk by chunk during its prefill."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contracts.errors import EngineFailure
from contracts.operations import empty_topk
from contracts.prompt_cells import PromptAltTokens
from engine.sampling.in_process.token_choice import draw_independently
from engine.sampling.replica import PromptScored, PromptScoring

NOT_FINITE = "the model gave logits that are not finite; no logprobs can be reported"
_DRAWN_LOGITS = 1 << 22
"""Most logits that are made cumulative at a time, in double precision."""


class PromptScores:
    """Scores of a prompt of P tokens (``PromptScoring``)."""

    def __init__(
        self,
        prompt: NDArray[np.int64],
        scoring: PromptScoring,
        *,
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> None:
        """Score ``prompt``, int64 (P,). ``temperature`` and ``seed`` are those of the alternatives."""
        length = len(prompt)
        self.begin = scoring.begin(length)
        """First position that is scored; P for none."""
        self._scoring = scoring
        self._temperature = temperature
        self._prompt = torch.tensor(prompt.tolist())
        self._logprobs = np.full(length, np.nan, np.float32) if scoring.logprobs else None
        self._topk = empty_topk(length, scoring.topk) if scoring.topk > 0 else None
        self._targets = None if scoring.targets is None else np.zeros(len(scoring.targets[0]), np.float32)
        self._alternatives: PromptAltTokens | None = None
        if scoring.alternatives:
            shape = (length - 1, scoring.alternatives)
            self._alternatives = PromptAltTokens(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
            self._uniforms = _alternatives_stream(seed)

    def add(self, logits: Tensor, first: int) -> None:
        """Score positions ``first`` to ``first + n - 1`` of the prompt with ``logits`` (n, V), which predict them.

        Positions outside ``begin`` to P - 1 are ignored. Raises ``EngineFailure`` when a logprob is not finite.
        """
        begin, end = max(first, self.begin), min(first + len(logits), len(self._prompt))
        if begin >= end:
            return
        logits = logits[begin - first : end - first].float()
        normaliser = logits.logsumexp(-1)
        if not bool(normaliser.isfinite().all()):
            raise EngineFailure(NOT_FINITE)
        scored = max(begin, min(self._scoring.start, end))
        self._add_scores(logits[scored - begin :], normaliser[scored - begin :], scored, end)
        self._add_targets(logits, normaliser, begin, end)
        self._add_alternatives(logits, normaliser, begin)

    def _add_scores(self, logits: Tensor, normaliser: Tensor, begin: int, end: int) -> None:
        if self._logprobs is not None and begin < end:
            targets = self._prompt[begin:end].to(logits.device)
            logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
            if not bool(logprobs.isfinite().all()):
                raise EngineFailure(NOT_FINITE)
            self._logprobs[begin:end] = logprobs.cpu().numpy()
        if self._topk is not None and begin < end:
            k = min(self._topk.token_ids.shape[1], logits.shape[-1])
            values, ids = logits.topk(k, dim=-1)
            self._topk.token_ids[begin:end, :k] = ids.cpu().numpy()
            self._topk.logprobs[begin:end, :k] = (values - normaliser[:, None]).cpu().numpy()

    def _add_targets(self, logits: Tensor, normaliser: Tensor, begin: int, end: int) -> None:
        if self._targets is None or self._scoring.targets is None:
            return
        positions, tokens = self._scoring.targets
        low, high = np.searchsorted(positions, [begin, end])
        if low < high:
            rows = torch.from_numpy(positions[low:high] - begin).to(logits.device)
            wanted = torch.from_numpy(tokens[low:high].copy()).to(logits.device)
            logprobs = logits[rows, wanted] - normaliser[rows]
            if not bool(logprobs.isfinite().all()):
                raise EngineFailure(NOT_FINITE)
            self._targets[low:high] = logprobs.cpu().numpy()

    def _add_alternatives(self, logits: Tensor, normaliser: Tensor, begin: int) -> None:
        if self._alternatives is None:
            return
        at_once = max(1, _DRAWN_LOGITS // logits.shape[-1])
        for row in range(0, len(logits), at_once):
            some = logits[row : row + at_once]
            uniforms = self._uniforms.random((len(some), self._scoring.alternatives))
            drawn = draw_independently(some, self._temperature, uniforms)
            logprobs = some.gather(-1, drawn) - normaliser[row : row + at_once, None]
            place = slice(begin - 1 + row, begin - 1 + row + len(some))
            self._alternatives.tokens[place] = drawn.cpu().numpy()
            self._alternatives.logprobs[place] = logprobs.cpu().numpy()

    @property
    def result(self) -> PromptScored:
        """Scores of the positions that were added."""
        return PromptScored(self._logprobs, self._topk, self._targets, self._alternatives)


def _alternatives_stream(seed: int | None) -> np.random.Generator:
    """Return random numbers that the sequences of the same seed do not draw. They are used in order of the positions."""
    entropy = np.random.SeedSequence() if seed is None else np.random.SeedSequence([1, int(seed < 0), abs(seed)])
    return np.random.Generator(np.random.Philox(entropy))
