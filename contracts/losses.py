"""What each loss of the SDK's wire needs and knows, for the torch-free API to check requests against."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from contracts.operations import LossName

CLIP_LOW, CLIP_HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"


@dataclass(frozen=True, slots=True)
class LossRule:
    """Inputs beside ``target_tokens``, all float32 of its shape, and config keys with their defaults."""

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
