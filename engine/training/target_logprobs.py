"""Log-probabilities of targets from hidden states, without a (positions x vocabulary) tensor beyond a chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.training.base import BaseModel
from engine.training.lora import AdapterSegment

CHUNK_LOGITS = 2**23
"""Logits of one chunk: 32 MiB in float32."""


def target_logprobs(
    base: BaseModel, hidden: Tensor, *, token_segments: Sequence[AdapterSegment], targets: Sequence[Tensor]
) -> Tensor:
    """Log-probabilities, flat float32 (sum of all targets,), of the sequences that make up ``hidden``.

    ``hidden`` is (positions, hidden size), the sequences one after another; ``token_segments`` name the adapter of each
    position; ``targets[i]`` is int64 (N_i,) or (N_i, K_i). Beyond one chunk, logits are computed again in the backward
    pass instead of being kept.
    """
    positions, wanted = _flatten(targets)
    positions, wanted = positions.to(hidden.device), wanted.to(hidden.device)
    chunk = max(1, CHUNK_LOGITS // base.facts.vocabulary_size)
    if hidden.shape[0] <= chunk:
        return _chunk_logprobs(base, hidden, list(token_segments), positions, wanted)
    parts = []
    for start in range(0, hidden.shape[0], chunk):
        end = min(start + chunk, hidden.shape[0])
        first, last = torch.searchsorted(positions, torch.tensor([start, end], device=positions.device)).tolist()
        arguments = (
            base,
            hidden[start:end],
            _cut(token_segments, start, end),
            positions[first:last] - start,
            wanted[first:last],
        )
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk_logprobs, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk_logprobs(*arguments))
    return torch.cat(parts)


def gather_logprobs(logits: Tensor, targets: Sequence[Tensor]) -> Tensor:
    """The same from ready float32 ``logits`` (positions, V)."""
    positions, wanted = _flatten(targets)
    return _normalised(logits, positions.to(logits.device), wanted.to(logits.device))


def _chunk_logprobs(
    base: BaseModel, hidden: Tensor, segments: list[AdapterSegment], positions: Tensor, wanted: Tensor
) -> Tensor:
    with base.adapters(segments):
        logits = base.head(hidden)
    return _normalised(logits, positions, wanted)


def _normalised(logits: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
    return logits[positions, wanted] - torch.logsumexp(logits, dim=-1)[positions]


def _flatten(targets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Position and token id of every target, in order."""
    positions, at = [], 0
    for target in targets:
        width = target.shape[1] if target.dim() == 2 else 1
        positions.append(torch.arange(at, at + target.shape[0]).repeat_interleave(width))
        at += target.shape[0]
    return torch.cat(positions), torch.cat([target.reshape(-1) for target in targets])


def _cut(segments: Sequence[AdapterSegment], start: int, end: int) -> list[AdapterSegment]:
    """The segments within ``[start, end)``, counted from ``start``."""
    return [
        AdapterSegment(segment.adapter, max(segment.start, start) - start, min(segment.end, end) - start)
        for segment in segments
        if segment.start < end and segment.end > start
    ]
