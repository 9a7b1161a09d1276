"""Log-probabilities of target tokens from hidden states, with logits for one chunk of positions at a time.

A (positions x vocabulary) tensor of a whole micro-batch would often be the largest tensor of a pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.model.base import BaseModel
from engine.training.low_rank import LowRankPlan

CHUNK_LOGITS = 2**22
"""Logits of one chunk: 16 MiB in float32."""


def target_logprobs(base: BaseModel, hidden: Tensor, *, plan: LowRankPlan, targets: Sequence[Tensor]) -> Tensor:
    """Return log-probabilities of all targets, float32 (sum of all targets,), by a log-softmax over the vocabulary.

    - ``hidden``: (positions, hidden size), the sequences one after another.
    - ``plan``: adapters on the head, a plan of tokens over these positions.
    - ``targets[i]``: of sequence i, int64 (N_i,) or (N_i, K_i).

    A chunk's logits are kept for the backward pass only if it is the only chunk.
    """
    positions, wanted = _flatten(targets)
    positions, wanted = positions.to(hidden.device), wanted.to(hidden.device)
    size = max(1, CHUNK_LOGITS // base.facts.vocabulary_size)
    adapts_head = base.output_name is not None and plan.adapts(base.output_name)
    if not adapts_head and torch.is_grad_enabled() and all(target.dim() == 1 for target in targets):
        logprobs: Tensor = _OneTargetLogprobs.apply(hidden, base, wanted, size)  # type: ignore[no-untyped-call]
        return logprobs
    parts = []
    for start in range(0, hidden.shape[0], size):
        end = min(start + size, hidden.shape[0])
        first, last = torch.searchsorted(positions, torch.tensor([start, end], device=positions.device)).tolist()
        chunk_plan = plan.cut(start, end) if adapts_head else None
        arguments = (base, hidden[start:end], chunk_plan, positions[first:last] - start, wanted[first:last])
        if torch.is_grad_enabled() and hidden.shape[0] > size:
            parts.append(checkpoint(_chunk_logprobs, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk_logprobs(*arguments))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gather_logprobs(logits: Tensor, targets: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities of ``target_logprobs`` from ready float32 ``logits`` (positions, V)."""
    positions, wanted = _flatten(targets)
    return _normalised(logits, positions.to(logits.device), wanted.to(logits.device))


class _OneTargetLogprobs(torch.autograd.Function):
    """Log-probabilities where each position has one target and no adapter changes the head.

    Each log-probability then depends on one hidden state only. Its derivative is computed in the forward pass, from the
    chunk's logits; the backward pass multiplies it by the upstream gradient. So the backward pass needs neither logits nor a
    second product with the vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, base: BaseModel, wanted: Tensor, size: int) -> Tensor:
        logprobs, slopes = [], []
        for part, targets in zip(torch.split(hidden, size), torch.split(wanted, size), strict=True):
            with torch.enable_grad():
                states = part.detach().requires_grad_()
                found = -functional.cross_entropy(base.head(states), targets, reduction="none")
                slopes.append(torch.autograd.grad(found.sum(), states)[0])
            logprobs.append(found.detach())
        ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (slopes,) = ctx.saved_tensors
        return (slopes * upstream[0][:, None]).to(slopes.dtype), None, None, None


def _chunk_logprobs(
    base: BaseModel, hidden: Tensor, plan: LowRankPlan | None, positions: Tensor, wanted: Tensor
) -> Tensor:
    if plan is None:
        return _normalised(base.head(hidden), positions, wanted)
    with base.adapters(plan):
        return _normalised(base.head(hidden), positions, wanted)


def _normalised(logits: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
    return logits[positions, wanted] - torch.logsumexp(logits, dim=-1)[positions]


def _flatten(targets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return position and token id of every target, int64 (sum of all targets,) each, in order."""
    positions, at = [], 0
    for target in targets:
        width = target.shape[1] if target.dim() == 2 else 1
        positions.append(torch.arange(at, at + target.shape[0]).repeat_interleave(width))
        at += target.shape[0]
    return torch.cat(positions), torch.cat([target.reshape(-1) for target in targets])
