"""Token-wise losses over flat vectors of targets, all sum-reduced (formulas: the SDK's public documentation).

``logp`` is the log-probability of each target under the current weights, ``q`` the one it was sampled with, ``A`` the
advantage, ``r = exp(logp - q)``. ``sg`` stops the gradient.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from contracts.losses import BETA, CLIP_HIGH, CLIP_LOW, LOSS_RULES
from contracts.operations import Datum, LossName, LossSpec

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
LossFunction = Callable[[Tensor, Inputs, Config], Tensor]
_DEFAULT_WEIGHT = 1.0


def flat_inputs(spec: LossSpec, data: Sequence[Datum]) -> dict[str, np.ndarray]:
    """The inputs that the loss knows, each float32 (M,) over all targets of ``data``; others are left out.

    An optional input that only some data carry is filled with its default for the rest: the config's, or weight 1.
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
    """Terms (M,) whose sum is the loss of ``logp`` float32 (M,) and ``inputs``, each float32 (M,), all required ones given."""
    return _LOSSES[spec.name](logp, inputs, {**LOSS_RULES[spec.name].config, **spec.config})


def _cross_entropy(logp: Tensor, inputs: Inputs, _config: Config) -> Tensor:
    """``-logp * w``, weights of any sign, 1 where not given."""
    weights = inputs.get("weights")
    return -logp if weights is None else -(logp * weights)


def _importance_sampling(logp: Tensor, inputs: Inputs, _config: Config) -> Tensor:
    """``-r * A``."""
    return -(_ratio(logp, inputs) * inputs["advantages"])


def _ppo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``-min(r * A, clip(r) * A)``; Schulman et al. 2017, thresholds as bounds of the ratio."""
    ratio, advantages = _ratio(logp, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages)


def _cispo(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``-sg(clip(r)) * logp * A``; MiniMax-M1, 2025."""
    clipped = _clip(_ratio(logp, inputs), inputs, config).detach()
    return -(clipped * logp * inputs["advantages"])


def _dro(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``-(logp * A - beta / 2 * (logp - q)^2)``; Richemond et al. 2024, direct reward optimisation."""
    drift = logp - inputs["logprobs"]
    return -(logp * inputs["advantages"] - 0.5 * config[BETA] * drift * drift)


def _ratio(logp: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(logp - inputs["logprobs"])


def _clip(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Per-token bounds where given, else the config's."""
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
