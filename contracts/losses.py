"""Names, inputs and settings of the training losses, for the API to check a request without torch.

The formulas are in ``engine.training.losses``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

CLIP_LOW, CLIP_HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"


class LossName(StrEnum):
    """Losses of the SDK's wire, all sum-reduced over tokens."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"


@dataclass(frozen=True, slots=True)
class LossRule:
    """Inputs and settings of one loss.

    ``required`` and ``optional`` are inputs beside ``target_tokens``, all float32 of the shape of ``target_tokens``.
    ``config`` has the loss's settings with their defaults.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


_POLICY_INPUTS = ("logprobs", "advantages")
_CLIP_CONFIG: Mapping[str, float] = MappingProxyType({CLIP_LOW: 0.8, CLIP_HIGH: 1.2})

LOSS_RULES: Mapping[LossName, LossRule] = MappingProxyType(
    {
        LossName.CROSS_ENTROPY: LossRule(optional=("weights",)),
        LossName.IMPORTANCE_SAMPLING: LossRule(required=_POLICY_INPUTS),
        LossName.PPO: LossRule(required=_POLICY_INPUTS, optional=(CLIP_LOW, CLIP_HIGH), config=_CLIP_CONFIG),
        LossName.CISPO: LossRule(required=_POLICY_INPUTS, optional=(CLIP_LOW, CLIP_HIGH), config=_CLIP_CONFIG),
        LossName.DRO: LossRule(required=_POLICY_INPUTS, config=MappingProxyType({BETA: 0.05})),
    }
)
