"""Logprobs and likeliest tokens at the positions of a prompt, gathered chunk by chunk during its prefill."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contracts.errors import EngineFailure
from contracts.operations import TopkLogprobs, empty_topk
from engine.sampling.replica import PromptScoring

NOT_FINITE = "the model gave logits that are not finite; no logprobs can be reported"


class PromptScores:
    """Scores of a prompt of P tokens from position ``start`` on: logprobs, the k likeliest tokens, or both."""

    def __init__(self, prompt: NDArray[np.int64], scoring: PromptScoring) -> None:
        length = len(prompt)
        self.start = min(scoring.start, length)
        self._prompt = torch.tensor(prompt.tolist())
        self._logprobs = np.full(length, np.nan, np.float32) if scoring.logprobs else None
        self._topk = empty_topk(length, scoring.topk) if scoring.topk > 0 else None

    def add(self, logits: Tensor, first: int) -> None:
        """Score positions ``first`` to ``first + n - 1`` of the prompt with ``logits`` (n, V), which predict them.

        Positions outside ``start`` to P - 1 are ignored. Raises ``EngineFailure`` when a logprob is not finite.
        """
        begin, end = max(first, self.start), min(first + len(logits), len(self._prompt))
        if begin >= end:
            return
        logits = logits[begin - first : end - first].float()
        targets = self._prompt[begin:end].to(logits.device)
        normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        if not bool(logprobs.isfinite().all()):
            raise EngineFailure(NOT_FINITE)
        if self._logprobs is not None:
            self._logprobs[begin:end] = logprobs.cpu().numpy()
        if self._topk is not None:
            k = min(self._topk.token_ids.shape[1], logits.shape[-1])
            values, ids = logits.topk(k, dim=-1)
            self._topk.token_ids[begin:end, :k] = ids.cpu().numpy()
            self._topk.logprobs[begin:end, :k] = (values - normaliser[:, None]).cpu().numpy()

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """Float32 (P,), NaN at 0 and before ``start``; None if the request asks for none."""
        return self._logprobs

    @property
    def topk(self) -> TopkLogprobs | None:
        """Likeliest tokens (P, k), empty at unscored positions; None if the request asks for none."""
        return self._topk
