"""Training losses over flat vectors of targets, all sum-reduced over tokens.

The formulas are those of the SDK's public documentation, but for ``stable_reinforce``, whose formula is weft's own. Each loss
names its paper. In them:

- ``logp``: log-probability of a target under the current weights; ``q``: under the weights that sampled it.
- ``A``: advantage; ``w``: weight; ``r = exp(logp - q)``: probability ratio.
- ``clip(r)``: ``r`` limited to the clip thresholds; ``sg``: stops the gradient.

``docs/reference/losses.md`` tells users the same formulas.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from contracts.losses import (
    ADVANTAGES,
    BETA,
    CLIP_HIGH,
    CLIP_LOW,
    KL_COEFF,
    LOSS_RULES,
    RATIO_CAP,
    RATIO_MASK,
    SAMPLING_LOGPROBS,
    LossName,
)
from contracts.operations import Datum, LossSpec
from engine.training.policy_record import is_sampled, sampling_logprobs

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
LossFunction = Callable[[Tensor, Inputs, Config], Tensor]
SEQUENCE_SIZES = "sequence_sizes"
"""Key among the inputs of the numbers of targets of each sequence, int64 (sequences,)."""
_DEFAULT_WEIGHT = 1.0


def flat_inputs(spec: LossSpec, data: Sequence[Datum]) -> dict[str, np.ndarray]:
    """Return the inputs that the loss knows, each float32 (M,) over all M targets of ``data``; other inputs are left out.

    ``SEQUENCE_SIZES`` is among them.

    Where only some data have an optional input, the others get its default: the config's value, or weight 1.
    ``sequence_ratio_mask`` marks the sampled targets where it is not given.
    """
    rule = LOSS_RULES[spec.name]
    defaults = {**rule.config, **spec.config}
    names = (*rule.required, *rule.optional)
    given = [name for name in names if name == RATIO_MASK or any(name in datum.inputs for datum in data)]
    inputs = {
        name: np.concatenate([_flat_input(datum, name, defaults.get(name, _DEFAULT_WEIGHT)) for datum in data])
        for name in given
    }
    return inputs | {SEQUENCE_SIZES: np.array([datum.targets.size for datum in data])}


def _flat_input(datum: Datum, name: str, default: float) -> np.ndarray:
    if name == RATIO_MASK:
        values: np.ndarray | None = is_sampled(datum)
    elif name == SAMPLING_LOGPROBS:
        values = sampling_logprobs(datum)
    else:
        values = datum.inputs.get(name)
    if values is None:
        return np.full(datum.targets.size, default, dtype=np.float32)
    return values.ravel().astype(np.float32)


def loss_terms(spec: LossSpec, logp: Tensor, inputs: Inputs) -> Tensor:
    """Return terms, float32 (M,), whose sum is the loss of ``logp`` float32 (M,) and ``inputs``.

    ``inputs`` are those of ``flat_inputs``, with all that the loss requires.
    """
    return _LOSSES[spec.name](logp, inputs, {**LOSS_RULES[spec.name].config, **spec.config})


def _cross_entropy(logp: Tensor, inputs: Inputs, _config: Config) -> Tensor:
    """Weighted negative log-likelihood: ``-logp * w``, weights of any sign, 1 where not given."""
    weights = inputs.get("weights")
    return -logp if weights is None else -(logp * weights)


def _importance_sampling(logp: Tensor, inputs: Inputs, _config: Config) -> Tensor:
    """Policy gradient with importance weights: ``-r * A``; Degris, White and Sutton 2012, "Off-Policy Actor-Critic"."""
    return -(_ratio(logp, inputs) * inputs[ADVANTAGES])


def _ppo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Clipped surrogate: ``-min(r * A, clip(r) * A)``; Schulman et al. 2017, "Proximal Policy Optimization Algorithms"."""
    return _clipped_surrogate(_ratio(logp, inputs), inputs, config)


def _cispo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Clipped importance weights: ``-sg(clip(r)) * logp * A``; MiniMax 2025, "MiniMax-M1"."""
    clipped = _clip(_ratio(logp, inputs), inputs, config).detach()
    return -(clipped * logp * inputs[ADVANTAGES])


def _dro(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Direct reward optimisation: ``-(logp * A - beta / 2 * (logp - q)^2)``, the policy's part of the method's loss.

    Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language Models Alignment".
    """
    drift = logp - inputs[SAMPLING_LOGPROBS]
    return -(logp * inputs[ADVANTAGES] - 0.5 * config[BETA] * drift * drift)


def _gspo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Clipped surrogate of ``s_t = sg(s) * p / sg(p)``, the token-wise form of the paper (GSPO-token).

    ``s``: the sequence's ratio, ``exp`` of the mean of ``logp - q`` over the tokens that ``sequence_ratio_mask`` marks, or
    the sampled ones without it; 1 where there are none. Zheng et al. 2025, "Group Sequence Policy Optimization".
    """
    is_marked = (inputs[RATIO_MASK] != 0).to(logp.dtype)
    drift = (logp.detach() - inputs[SAMPLING_LOGPROBS]) * is_marked
    sizes = inputs[SEQUENCE_SIZES]
    # segment_reduce adds each sequence for itself, in one order: beside other tenants' sequences the sum is bit-equal.
    sums, counts = (torch.segment_reduce(values, "sum", lengths=sizes) for values in (drift, is_marked))
    log_ratio = (sums / counts.clamp(min=1)).repeat_interleave(sizes)
    return _clipped_surrogate(torch.exp(log_ratio + logp - logp.detach()), inputs, config)


def _stable_reinforce(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """weft's own: ``-sg(min(r, c)) * logp * A + kl_coeff * k``, where ``c`` is ``ratio_cap``.

    - ``min(r, c)``: truncated importance weight; Ionides 2008, "Truncated Importance Sampling".
    - ``k``: ``r - 1 - log r``, which estimates the KL divergence of the current weights from the sampling weights without
      bias; Schulman 2020, "Approximating KL Divergence", k3. Beyond ``r = c`` it goes on as its tangent in ``log r``: no
      token's slope, ``min(r, c) - 1``, grows without bound.

    Tokens with sampling logprob 0 and advantage 0 are not sampled ones, and cost nothing.
    """
    drift = logp - inputs[SAMPLING_LOGPROBS]
    cap = config[RATIO_CAP]
    truncated = drift.clamp(max=math.log(cap))
    divergence = torch.exp(truncated) - 1 - truncated + (cap - 1) * (drift - truncated)
    is_sampled = (inputs[SAMPLING_LOGPROBS] != 0) | (inputs[ADVANTAGES] != 0)
    gain = torch.exp(truncated).detach() * logp * inputs[ADVANTAGES]
    return torch.where(is_sampled, config[KL_COEFF] * divergence - gain, torch.zeros_like(logp))


def _not_yet(logp: Tensor, _inputs: Inputs, _config: Config) -> Tensor:
    """Zeros: the forward of a custom loss, which is computed once the logprobs are known (``engine.training.custom_loss``)."""
    return torch.zeros_like(logp)


def _clipped_surrogate(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    advantages = inputs[ADVANTAGES]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages)


def _ratio(logp: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(logp - inputs[SAMPLING_LOGPROBS])


def _clip(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Limit ``ratio`` to the per-token thresholds where given, else to the config's."""
    low = inputs.get(CLIP_LOW, ratio.new_tensor(config[CLIP_LOW]))
    high = inputs.get(CLIP_HIGH, ratio.new_tensor(config[CLIP_HIGH]))
    return torch.maximum(torch.minimum(ratio, high), low)


_LOSSES: Mapping[LossName, LossFunction] = {
    LossName.CROSS_ENTROPY: _cross_entropy,
    LossName.IMPORTANCE_SAMPLING: _importance_sampling,
    LossName.PPO: _ppo,
    LossName.CISPO: _cispo,
    LossName.DRO: _dro,
    LossName.GSPO: _gspo,
    LossName.STABLE_REINFORCE: _stable_reinforce,
    LossName.CUSTOM: _not_yet,
}
