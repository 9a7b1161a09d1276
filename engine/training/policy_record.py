"""Record of the policy that sampled a datum's tokens, how far the current weights are from that policy, and a loss's weights."""

from collections.abc import Sequence

import numpy as np

from contracts.losses import ADVANTAGES, LOSS_RULES, RATIO_MASK, SAMPLING_LOGPROBS, LossName
from contracts.operations import Datum, LossSpec, TrainingBatch

OFF_POLICY = 0.1
"""Distance of a probability ratio from 1 from which ``ratio_outside`` counts the token."""
_LARGEST_EXPONENT = 700.0
"""Bound of a log-ratio whose ``exp`` is still a float64."""


def sampling_logprobs(datum: Datum) -> np.ndarray:
    """Return the log-probabilities with which the datum's targets were sampled, in the shape of its targets.

    The datum brings them itself, as its input ``logprobs``.
    """
    return datum.inputs[SAMPLING_LOGPROBS]


def is_sampled(datum: Datum) -> np.ndarray:
    """Return which targets were sampled, bool in their shape.

    Clients write logprob 0 and advantage 0 at the tokens of a prompt or of an environment; ``gspo`` marks the sampled tokens.
    """
    mask = datum.inputs.get(RATIO_MASK)
    if mask is not None:
        marked: np.ndarray = mask != 0
        return marked
    found: np.ndarray = (sampling_logprobs(datum) != 0) | (datum.inputs[ADVANTAGES] != 0)
    return found


def policy_metrics(loss: LossSpec, data: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """Return metrics of a policy loss over the sampled tokens; none for another loss.

    With the probability ratio r of the current weights to the sampling ones:

    - ``sampling_kl:mean``: mean of ``r - 1 - log r``; Schulman 2020, "Approximating KL Divergence", k3.
    - ``ratio_outside:mean``: share of ratios outside 0.9 to 1.1.
    - ``ratio:max``: the largest ratio. ``sampled_tokens:sum``: the number of sampled tokens, alone if it is 0.
    """
    if not LOSS_RULES[loss.name].is_policy:
        return {}
    drifts = [
        (found.astype(np.float64) - sampling_logprobs(datum))[is_sampled(datum)]
        for datum, found in zip(data, logprobs, strict=True)
    ]
    drift = np.concatenate(drifts).clip(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    if not drift.size:
        # The SDK drops a sum that one request of a call lacks.
        return {"sampled_tokens:sum": 0.0}
    excess = np.expm1(drift)
    return {
        "sampling_kl:mean": float(np.mean(excess - drift)),
        "ratio_outside:mean": float(np.mean(np.abs(excess) > OFF_POLICY)),
        "ratio:max": float(np.max(excess)) + 1.0,
        "sampled_tokens:sum": float(drift.size),
    }


def weight_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return ``weights:sum`` of cross entropy, by which its ``loss:sum`` is a mean; nothing for other losses.

    Nothing either where a weight is negative, since no mean is meant then. A target without a weight weighs 1.
    A sum of 0 is returned, too: the SDK drops a sum that one request of a call lacks.
    """
    if batch.loss.name is not LossName.CROSS_ENTROPY:
        return {}
    weights = [datum.inputs.get("weights") for datum in batch.data]
    if any(one is not None and (one < 0).any() for one in weights):
        return {}
    total = sum(
        datum.targets.size if one is None else float(one.sum(dtype=np.float64))
        for datum, one in zip(batch.data, weights, strict=True)
    )
    return {"weights:sum": float(total)}
