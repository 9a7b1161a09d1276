"""Checks a training batch before it joins a fused pass, since one bad index would fail the batches of all tenants in the pass.

The API makes the same checks on arrival. This module keeps the engine safe without them.
"""

from collections.abc import Sequence

import numpy as np

from contracts.base_model import BaseModelFacts
from contracts.custom_loss import check_inputs, read_custom_loss
from contracts.errors import InvalidRequest
from contracts.losses import LOSS_RULES, WITHOUT_ADAPTER, LossName, LossRule
from contracts.operations import Datum, TrainingBatch


def check_batch(batch: TrainingBatch, facts: BaseModelFacts, *, backward: bool = False) -> None:
    """Raise ``InvalidRequest``, naming the field, unless shapes, token ids, inputs and config fit the loss and the base."""
    rule = LOSS_RULES[batch.loss.name]
    if batch.without_adapter and backward:
        raise InvalidRequest(f"loss_fn_config.{WITHOUT_ADAPTER}: the base model itself is not trained; call forward")
    unknown = sorted(set(batch.loss.config) - set(rule.config))
    if unknown:
        known = ", ".join(rule.config) or "none"
        raise InvalidRequest(f"loss_fn_config: {unknown[0]!r} is no setting of {batch.loss.name}; it knows: {known}")
    rule.check_config(batch.loss.config)
    custom = read_custom_loss(batch.loss.loss_id) if batch.loss.name is LossName.CUSTOM else None
    if not batch.data:
        raise InvalidRequest("data is empty; send at least one datum")
    for number, datum in enumerate(batch.data):
        _check_datum(datum, f"data[{number}]", rule, facts)
        if custom is not None:
            check_inputs(custom, datum.targets, datum.inputs, f"data[{number}]")


def _check_datum(datum: Datum, field: str, rule: LossRule, facts: BaseModelFacts) -> None:
    length, shape = len(datum.tokens), datum.targets.shape
    if datum.tokens.ndim != 1 or not 0 < length <= facts.context_length:
        raise InvalidRequest(
            f"{field}.model_input has {length} tokens; {facts.name} takes 1 to {facts.context_length} in one dimension"
        )
    if datum.targets.ndim not in (1, 2) or shape[0] != length or datum.targets.size == 0:
        raise InvalidRequest(
            f"{field}.loss_fn_inputs.target_tokens has shape {list(shape)}; it must be [{length}] or [{length}, K]"
        )
    for name, ids in (("model_input", datum.tokens), ("loss_fn_inputs.target_tokens", datum.targets)):
        if ids.min() < 0 or ids.max() >= facts.vocabulary_size:
            raise InvalidRequest(f"{field}.{name} has token ids outside 0 to {facts.vocabulary_size - 1}")
    _check_inputs(datum, field, rule.required, rule.optional)


def _check_inputs(datum: Datum, field: str, required: Sequence[str], optional: Sequence[str]) -> None:
    missing = [name for name in required if name not in datum.inputs]
    if missing:
        raise InvalidRequest(f"{field}.loss_fn_inputs: {', '.join(missing)} must be given")
    for name in (*required, *optional):
        values = datum.inputs.get(name)
        if values is None:
            continue
        if values.shape != datum.targets.shape:
            raise InvalidRequest(
                f"{field}.loss_fn_inputs.{name} has shape {list(values.shape)}; it must be that of target_tokens, "
                f"{list(datum.targets.shape)}"
            )
        if not np.isfinite(values).all():
            raise InvalidRequest(f"{field}.loss_fn_inputs.{name} has NaN or infinite values")
