"""Names, inputs and settings of the training losses, for the API to check a request without torch.

The formulas are in ``engine.training.losses``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from contracts.errors import InvalidRequest

CLIP_LOW, CLIP_HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
KL_COEFF, RATIO_CAP = "kl_coeff", "ratio_cap"
SAMPLING_LOGPROBS, ADVANTAGES, RATIO_MASK = "logprobs", "advantages", "sequence_ratio_mask"
LARGEST_RATIO_CAP = 1e4
WITHOUT_ADAPTER = "without_adapter"
"""Setting of every loss in a ``forward``: 1 computes the bare base, 0 the run's adapter."""


class LossName(StrEnum):
    """Losses of the SDK's wire, all sum-reduced over tokens."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"
    GSPO = "gspo"
    STABLE_REINFORCE = "stable_reinforce"
    CUSTOM = "custom"
    """A loss that the SDK has traced (``contracts.custom_loss``)."""


@dataclass(frozen=True, slots=True)
class LossRule:
    """Inputs and settings of one loss.

    ``required`` and ``optional`` are inputs beside ``target_tokens``, all float32 of the shape of ``target_tokens``.
    ``config`` has the loss's settings with their defaults.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_policy(self) -> bool:
        """True for a loss of sampled tokens, which brings the logprobs that they were sampled with."""
        return SAMPLING_LOGPROBS in self.required

    def check_config(self, config: Mapping[str, float]) -> None:
        """Raise ``InvalidRequest`` for settings with which the loss is not defined."""
        cap, coefficient = config.get(RATIO_CAP, 1.0), config.get(KL_COEFF, 0.0)
        if not 1 <= cap <= LARGEST_RATIO_CAP:
            raise InvalidRequest(f"loss_fn_config.{RATIO_CAP} must be 1 to {LARGEST_RATIO_CAP:g}; got {cap}")
        if coefficient < 0:
            raise InvalidRequest(f"loss_fn_config.{KL_COEFF} must be 0 or more; got {coefficient}")


_POLICY_INPUTS = (SAMPLING_LOGPROBS, ADVANTAGES)
_CLIP_CONFIG: Mapping[str, float] = MappingProxyType({CLIP_LOW: 0.8, CLIP_HIGH: 1.2})
# One-sided: with a lower bound, tokens that the policy has left far behind would be learned from at nearly full weight.
_CISPO_CONFIG: Mapping[str, float] = MappingProxyType({CLIP_LOW: 0.0, CLIP_HIGH: 4.0})

LOSS_RULES: Mapping[LossName, LossRule] = MappingProxyType(
    {
        LossName.CROSS_ENTROPY: LossRule(optional=("weights",)),
        LossName.IMPORTANCE_SAMPLING: LossRule(required=_POLICY_INPUTS),
        LossName.PPO: LossRule(required=_POLICY_INPUTS, optional=(CLIP_LOW, CLIP_HIGH), config=_CLIP_CONFIG),
        LossName.CISPO: LossRule(required=_POLICY_INPUTS, optional=(CLIP_LOW, CLIP_HIGH), config=_CISPO_CONFIG),
        LossName.DRO: LossRule(required=_POLICY_INPUTS, config=MappingProxyType({BETA: 0.05})),
        LossName.GSPO: LossRule(
            required=_POLICY_INPUTS, optional=(RATIO_MASK, CLIP_LOW, CLIP_HIGH), config=_CLIP_CONFIG
        ),
        LossName.STABLE_REINFORCE: LossRule(
            required=_POLICY_INPUTS, config=MappingProxyType({KL_COEFF: 0.01, RATIO_CAP: 2.0})
        ),
        LossName.CUSTOM: LossRule(),
    }
)
