"""Token-wise training losses over flat vectors of targets, all sum-reduced.

The formulas are those of the SDK's public documentation; each loss names its paper. In them:

- ``logp``: log-probability of a target under the current weights; ``q``: under the weights that sampled it.
- ``A``: advantage; ``w``: weight; ``r = exp(logp - q)``: probability ratio.
- ``clip(r)``: ``r`` limited to the clip thresholds; ``sg``: stops the gradient.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from contracts.losses import BETA, CLIP_HIGH, CLIP_LOW, LOSS_RULES, LossName
from contracts.operations import Datum, LossSpec

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
LossFunction = Callable[[Tensor, Inputs, Config], Tensor]
_DEFAULT_WEIGHT = 1.0


def flat_inputs(spec: LossSpec, data: Sequence[Datum]) -> dict[str, np.ndarray]:
    """Return the inputs that the loss knows, each float32 (M,) over all M targets of ``data``; other inputs are left out.

    Where only some data have an optional input, the others get its default: the config's value, or weight 1.
    """
    rule = LOSS_RULES[spec.name]
    defaults = {**rule.config, **spec.config}
    given = [name for name in (*rule.required, *rule.optional) if any(name in datum.inputs for datum in data)]
    return {
        name: np.concatenate([_flat_input(datum, name, defaults.get(name, _DEFAULT_WEIGHT)) for datum in data])
        for name in given
    }


def _flat_input(datum: Datum, name: str, default: float) -> np.ndarray:
    values = datum.inputs.get(name)
    if values is None:
        return np.full(datum.targets.size, default, dtype=np.float32)
    return values.ravel().astype(np.float32)


def loss_terms(spec: LossSpec, logp: Tensor, inputs: Inputs) -> Tensor:
    """Return terms, float32 (M,), whose sum is the loss of ``logp`` float32 (M,) and ``inputs``, each float32 (M,).

    ``inputs`` must hold all inputs that the loss requires.
    """
    return _LOSSES[spec.name](logp, inputs, {**LOSS_RULES[spec.name].config, **spec.config})


def _cross_entropy(logp: Tensor, inputs: Inputs, _config: Config) -> Tensor:
    """Weighted negative log-likelihood: ``-logp * w``, weights of any sign, 1 where not given."""
    weights = inputs.get("weights")
    return -logp if weights is None else -(logp * weights)


def _importance_sampling(logp: Tensor, inputs: Inputs, _config: Config) -> Tensor:
    """Policy gradient with importance weights: ``-r * A``; Degris, White and Sutton 2012, "Off-Policy Actor-Critic"."""
    return -(_ratio(logp, inputs) * inputs["advantages"])


def _ppo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Clipped surrogate: ``-min(r * A, clip(r) * A)``; Schulman et al. 2017, "Proximal Policy Optimization Algorithms"."""
    ratio, advantages = _ratio(logp, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages)


def _cispo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Clipped importance weights: ``-sg(clip(r)) * logp * A``; MiniMax 2025, "MiniMax-M1"."""
    clipped = _clip(_ratio(logp, inputs), inputs, config).detach()
    return -(clipped * logp * inputs["advantages"])


def _dro(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Direct reward optimisation: ``-(logp * A - beta / 2 * (logp - q)^2)``, the policy's part of the method's loss.

    Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language Models Alignment".
    """
    drift = logp - inputs["logprobs"]
    return -(logp * inputs["advantages"] - 0.5 * config[BETA] * drift * drift)


def _ratio(logp: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(logp - inputs["logprobs"])


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
}
