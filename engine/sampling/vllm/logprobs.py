"""Converts vLLM's logprobs to weft's records. A logprob that is missing or clamped is an error, never a number."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from contracts.errors import EngineFailure
from contracts.operations import empty_topk
from engine.sampling.replica import PromptScored, PromptScoring
from engine.sampling.vllm.messages import PromptToken, Sampled

# vLLM sends this number for minus infinity, for NaN and for a token without a logprob.
_CLAMPED = -9999.0
Topk = tuple[NDArray[np.int32], NDArray[np.float32]]


def checked(logprob: float | None) -> float:
    """Return ``logprob``. Raises ``EngineFailure`` when it is missing, clamped or not finite."""
    if logprob is None or not math.isfinite(logprob) or logprob <= _CLAMPED:
        raise EngineFailure("the model gave a logprob that is missing or not finite")
    return logprob


def topk_of(sampled: Sampled, k: int) -> Topk:
    """Return the ``k`` likeliest tokens of an answer to a request for ``k + 1``. Raises ``EngineFailure`` for fewer.

    vLLM counts the sampled token among the ``k + 1``, even if it is not one of the likeliest.
    """
    return _likeliest(((entry.token_id, entry.logprob) for entry in sampled.top_logprobs), k)


def prompt_scores(
    prompt: Sequence[int], scoring: PromptScoring, table: Sequence[dict[str, PromptToken] | None] | None
) -> PromptScored:
    """Return the scores in vLLM's ``prompt_logprobs``. Raises ``EngineFailure`` when a position or a token is missing."""
    if table is None or len(table) != len(prompt):
        raise EngineFailure("the replica did not score every token of the prompt")
    logprobs = np.full(len(prompt), np.nan, np.float32) if scoring.logprobs else None
    topk = empty_topk(len(prompt), scoring.topk) if scoring.topk > 0 else None
    for position in range(scoring.start, len(prompt)):
        row = table[position] or {}
        own = row.get(str(prompt[position]), PromptToken())
        score = checked(own.logprob)
        if logprobs is not None:
            logprobs[position] = score
        if topk is not None:
            entries = ((int(token), entry.logprob) for token, entry in row.items())
            topk.token_ids[position], topk.logprobs[position] = _likeliest(entries, scoring.topk)
    return PromptScored(logprobs, topk)


def _likeliest(entries: Iterable[tuple[int, float | None]], k: int) -> Topk:
    best = sorted(((token, checked(logprob)) for token, logprob in entries), key=lambda one: -one[1])[:k]
    if len(best) < k:
        raise EngineFailure(f"the replica reported {len(best)} of the {k} likeliest tokens")
    return np.array([token for token, _ in best], np.int32), np.array([score for _, score in best], np.float32)


def likely_asked(topk: int) -> int:
    """Return the value of vLLM's ``logprobs`` that asks for ``topk`` likeliest tokens besides the sampled one."""
    return topk + 1 if topk else 0
