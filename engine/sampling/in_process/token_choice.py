"""Draws the next token of many sequences at once, each by its own temperature, top-k, top-p and random stream.

Sequence i is row i of the tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class ChoiceParams(Protocol):
    """Sampling parameters of one sequence: ``temperature`` 0 is greedy, ``top_k`` -1 and ``top_p`` 1 are off."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...


def uniform_stream(seed: int | None) -> np.random.Generator:
    """Return the random numbers of one sequence: the counter-based stream of ``seed``, or a fresh one without a seed.

    A sequence draws exactly one uniform a token, so the rest of the batch cannot shift its stream.
    """
    if seed is None:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence()))
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([0, int(seed < 0), abs(seed)])))


def is_greedy(params: ChoiceParams) -> bool:
    """Tell whether the likeliest token is always chosen, without randomness."""
    return params.temperature == 0 or params.top_k == 1


@dataclass(frozen=True)
class ChoiceRules:
    """Sampling parameters of a fixed list of B sequences, laid out as tensors."""

    params: tuple[ChoiceParams, ...]
    device: torch.device

    @cached_property
    def greedy(self) -> Tensor:
        """Bool (B,): the greedy rows."""
        return torch.tensor([is_greedy(params) for params in self.params], device=self.device)

    @cached_property
    def any_greedy(self) -> bool:
        return any(is_greedy(params) for params in self.params)

    @cached_property
    def all_greedy(self) -> bool:
        return all(is_greedy(params) for params in self.params)

    @cached_property
    def temperature(self) -> Tensor:
        """Float32 (B, 1); 1 in greedy rows, whose draw is discarded."""
        values = [1.0 if is_greedy(params) else params.temperature for params in self.params]
        return torch.tensor(values, device=self.device, dtype=torch.float32)[:, None]

    @cached_property
    def top_k(self) -> tuple[Tensor, Tensor] | None:
        """Row numbers with top-k, int64 (R,), and their k, int64 (R, 1); None when no row has it."""
        found = [(row, p.top_k) for row, p in enumerate(self.params) if p.top_k > 1 and not is_greedy(p)]
        if not found:
            return None
        rows, ks = zip(*found, strict=True)
        return torch.tensor(rows, device=self.device), torch.tensor(ks, device=self.device)[:, None]

    @cached_property
    def top_p(self) -> tuple[Tensor, Tensor] | None:
        """Row numbers with top-p, int64 (R,), and their p, float64 (R, 1); None when no row has it."""
        found = [(row, p.top_p) for row, p in enumerate(self.params) if p.top_p < 1 and not is_greedy(p)]
        if not found:
            return None
        rows, ps = zip(*found, strict=True)
        return torch.tensor(rows, device=self.device), torch.tensor(ps, device=self.device, dtype=torch.float64)[
            :, None
        ]


def choose_tokens(logits: Tensor, rules: ChoiceRules, uniforms: Sequence[float]) -> Tensor:
    """Return the next tokens, int64 (B,), drawn from ``logits`` float32 (B, V) with one uniform of [0, 1) a row.

    The rules apply in this order: temperature; top-k (ties with the k-th logit stay in); top-p, the smallest set of the
    likeliest tokens whose probability reaches p. A row with NaN gives an arbitrary token: check the row's log-normaliser.
    """
    if rules.all_greedy:
        return logits.argmax(-1)
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scaled = (logits - logits.amax(-1, keepdim=True)) / rules.temperature
    if rules.top_k is not None:
        _keep_top_k(scaled, *rules.top_k)
    if rules.top_p is not None:
        _keep_top_p(scaled, *rules.top_p)
    drawn = _inverse_cdf(scaled, torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]).squeeze(-1)
    return torch.where(rules.greedy, logits.argmax(-1), drawn) if rules.any_greedy else drawn


def draw_independently(logits: Tensor, temperature: float, uniforms: NDArray[np.float64]) -> Tensor:
    """Return k tokens for each row, int64 (B, k), drawn from ``logits`` float32 (B, V) with ``uniforms`` of [0, 1), (B, k).

    Draws are with replacement, at ``temperature`` alone; at 0 all of them are the likeliest token.
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True).expand(-1, uniforms.shape[1])
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    return _inverse_cdf(scaled, torch.from_numpy(uniforms).to(logits.device))


def _keep_top_k(scaled: Tensor, rows: Tensor, top_k: Tensor) -> None:
    top_k = top_k.clamp(max=scaled.shape[-1])
    picked = scaled[rows]
    kth = picked.topk(int(top_k.max()), dim=-1).values.gather(-1, top_k - 1)
    scaled[rows] = picked.masked_fill(picked < kth, -torch.inf)


def _keep_top_p(scaled: Tensor, rows: Tensor, top_p: Tensor) -> None:
    picked = scaled[rows]
    ordered, order = picked.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.double().softmax(-1)
    dropped = probabilities.cumsum(-1) - probabilities >= top_p
    dropped[:, 0] = False
    scaled[rows] = picked.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def _inverse_cdf(scaled: Tensor, uniforms: Tensor) -> Tensor:
    """Return for ``uniforms`` (B, k) each row's first tokens (B, k) whose cumulative weight exceeds the uniform times the total.

    None of them has weight zero.
    """
    cumulative = scaled.double().exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(cumulative, target, right=True)
    return chosen.clamp_(max=scaled.shape[-1] - 1)
