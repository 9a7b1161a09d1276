"""Conversion of training requests to typed records that are checked against loss and base model.

A request is a protobuf message, or JSON from an old SDK.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from api.wire import tensors
from api.wire import weft_wire_pb2 as pb
from api.wire.model_input import text_only, tokens_of
from api.wire.protobuf_counts import check_field_count, layout_of
from api.wire.tensors import ExpansionBudget
from api.wire.tinker_requests import MAX_SEQ_ID, ForwardInput, JsonDatum
from api.wire.token_ids import check_token_ids, joined
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.losses import LOSS_RULES, LossName
from contracts.operations import Datum, LossSpec, TrainingBatch
from store.settings import Settings

TARGETS = "target_tokens"
MOST_FIELDS = 131_072
"""Most protobuf fields of a request, at all depths. A request of the SDK, 1,024 sequences with four inputs, has 37,000."""
_LAYOUT = layout_of(pb.ForwardBackwardRequest)
_MODEL_ID_TAG = 1 << 3 | 2
_SEQ_ID_TAG = 2 << 3 | 0
"""Protobuf field tags of the first two fields of ``ForwardBackwardRequest``."""


@dataclass(frozen=True, slots=True)
class RawDatum:
    """A datum as received: token ids int64 (N,) and named arrays, parsed but not checked."""

    tokens: np.ndarray
    inputs: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A forward or forward_backward request as received: parsed but not checked."""

    loss: str
    config: Mapping[str, float | str]
    data: list[RawDatum]


def parse_proto(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse the body. Raises ``InvalidRequest`` unless it is a ``ForwardBackwardRequest`` message of ``MOST_FIELDS``."""
    check_field_count(body, _LAYOUT, MOST_FIELDS)
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(
            "the body is no ForwardBackwardRequest protobuf message; send one, or JSON as application/json"
        ) from error


def key_of(message: pb.ForwardBackwardRequest) -> tuple[str, int]:
    """Return ``model_id`` and ``seq_id``. Raises ``InvalidRequest`` for values that no run can have."""
    if not _is_key(message.model_id, message.seq_id):
        raise InvalidRequest(f"model_id or seq_id is not valid; send the model's id and a seq_id of 0 to {MAX_SEQ_ID}")
    return message.model_id, message.seq_id


def _is_key(model_id: str, seq_id: int) -> bool:
    return model_id != "" and "\0" not in model_id and 0 <= seq_id <= MAX_SEQ_ID


def key_of_beginning(beginning: bytes) -> tuple[str, int] | None:
    """Return ``model_id`` and ``seq_id`` from the first bytes of a message, or None.

    Both are there although the rest is cut off, because fields 1 and 2 are encoded first.
    """
    if len(beginning) < 2 or beginning[0] != _MODEL_ID_TAG:
        return None
    length, at = _varint(beginning, 1)
    encoded = beginning[at : at + length]
    at += length
    if at >= len(beginning) or beginning[at] != _SEQ_ID_TAG:
        return None
    seq_id, _ = _varint(beginning, at + 1)
    try:
        model_id = encoded.decode()
    except UnicodeDecodeError:
        return None
    return (model_id, seq_id) if _is_key(model_id, seq_id) else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a protobuf varint and the place after it; bits that are cut off count as zeros."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80 or shift > 63:
            break
    return value, at


def raw_from_proto(message: pb.ForwardBackwardRequest, facts: BaseModelFacts, settings: Settings) -> RawBatch:
    """Return the arrays of a protobuf request. Raises ``InvalidRequest`` naming the field."""
    budget = ExpansionBudget(settings.max_body_bytes)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    if message.loss_fn_config_v2:
        config = {
            key: value.text if value.WhichOneof("value") == "text" else value.number
            for key, value in message.loss_fn_config_v2.items()
        }
    data = []
    for number, datum in enumerate(message.data):
        field = f"data[{number}]"
        pieces = []
        for chunk in datum.model_input:
            if chunk.WhichOneof("chunk") != "encoded_text":
                raise text_only(f"{field}.model_input", facts)
            if len(chunk.encoded_text.tokens) % 4:
                raise InvalidRequest(f"{field}.model_input: tokens must be int32 values of 4 bytes")
            pieces.append(np.frombuffer(chunk.encoded_text.tokens, dtype="<i4"))
        inputs = {
            name: tensors.from_proto(tensor, f"{field}.loss_fn_inputs.{name[:100]}", budget)
            for name, tensor in datum.loss_fn_inputs.items()
        }
        data.append(RawDatum(joined(pieces), inputs))
    return RawBatch(message.loss_fn, config, data)


def raw_from_json(request: ForwardInput, facts: BaseModelFacts, settings: Settings) -> RawBatch:
    """Return the arrays of a JSON request. Raises ``InvalidRequest`` naming the field."""
    budget = ExpansionBudget(settings.max_body_bytes)
    data = [_json_datum(datum, f"data[{number}]", facts, budget) for number, datum in enumerate(request.data)]
    return RawBatch(request.loss_fn, dict(request.loss_fn_config or {}), data)


def _json_datum(datum: JsonDatum, field: str, facts: BaseModelFacts, budget: ExpansionBudget) -> RawDatum:
    inputs = {
        name: tensors.from_lists(
            tensor.data,
            tensor.dtype,
            tensor.shape,
            tensor.sparse_crow_indices,
            tensor.sparse_col_indices,
            f"{field}.loss_fn_inputs.{name[:100]}",
            budget,
        )
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return RawDatum(tokens_of(datum.model_input, f"{field}.model_input", facts), inputs)


def check_batch(raw: RawBatch, facts: BaseModelFacts, settings: Settings) -> TrainingBatch:
    """Check the request and return its payload. Raises ``InvalidRequest`` naming the field and the limit."""
    loss = _loss(raw)
    if not raw.data:
        raise InvalidRequest("data is empty; send at least one datum")
    if len(raw.data) > settings.max_datums:
        raise InvalidRequest(f"data has {len(raw.data)} items; send at most {settings.max_datums} in one request")
    data = [_datum(datum, f"data[{number}]", loss, facts, settings) for number, datum in enumerate(raw.data)]
    return TrainingBatch(loss, data)


def _loss(raw: RawBatch) -> LossSpec:
    try:
        name = LossName(raw.loss)
    except ValueError:
        raise InvalidRequest(
            f"loss_fn {raw.loss[:100]!r} is unknown here; choose one of: {', '.join(LossName)}"
        ) from None
    rule = LOSS_RULES[name]
    config: dict[str, float] = {}
    for key, value in raw.config.items():
        if key not in rule.config:
            known = ", ".join(rule.config) or "none"
            raise InvalidRequest(f"loss_fn_config: {key[:100]!r} is no setting of {name}; its settings: {known}")
        if isinstance(value, str) or not np.isfinite(value):
            raise InvalidRequest(f"loss_fn_config.{key} must be a finite number")
        config[key] = float(value)
    rule.check_config(config)
    return LossSpec(name, config)


def _datum(raw: RawDatum, field: str, loss: LossSpec, facts: BaseModelFacts, settings: Settings) -> Datum:
    length = len(raw.tokens)
    if length == 0:
        raise InvalidRequest(f"{field}.model_input is empty; send at least one token")
    if length > facts.context_length:
        raise InvalidRequest(
            f"{field}.model_input has {length} tokens; the context of {facts.name} holds {facts.context_length}: shorten it"
        )
    check_token_ids(raw.tokens, f"{field}.model_input", facts)
    if TARGETS not in raw.inputs:
        raise InvalidRequest(f"{field}.loss_fn_inputs: {TARGETS} is missing; send a target for each input token")
    targets = raw.inputs[TARGETS]
    field_of_targets = f"{field}.loss_fn_inputs.{TARGETS}"
    if targets.dtype.kind != "i":
        raise InvalidRequest(f"{field_of_targets} must be int64")
    if targets.ndim not in (1, 2) or targets.shape[0] != length or targets.size == 0:
        raise InvalidRequest(
            f"{field_of_targets} has shape {list(targets.shape)}; it must be [{length}] or [{length}, K], a target for "
            f"each of the {length} input tokens"
        )
    if targets.ndim == 2 and targets.shape[1] > settings.max_targets_per_position:
        raise InvalidRequest(
            f"{field_of_targets}: K is {targets.shape[1]}; send at most {settings.max_targets_per_position}"
        )
    check_token_ids(targets, field_of_targets, facts)
    inputs = _loss_inputs(raw, field, loss, targets.shape)
    return Datum(raw.tokens.astype(np.int64), np.ascontiguousarray(targets, dtype=np.int64), inputs)


def _loss_inputs(raw: RawDatum, field: str, loss: LossSpec, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return the float32 inputs that the loss uses, each of ``shape``.

    Inputs that the loss does not know are refused, except by cross_entropy: custom losses of old SDKs send some along.
    """
    rule = LOSS_RULES[loss.name]
    missing = [name for name in rule.required if name not in raw.inputs]
    if missing:
        raise InvalidRequest(f"{field}.loss_fn_inputs: {loss.name} needs {', '.join(missing)}")
    known = {*rule.required, *rule.optional}
    unknown = sorted(set(raw.inputs) - known - {TARGETS})
    if unknown and loss.name is not LossName.CROSS_ENTROPY:
        raise InvalidRequest(
            f"{field}.loss_fn_inputs: {unknown[0][:100]!r} is no input of {loss.name}; it takes {TARGETS}, "
            f"{', '.join(sorted(known))}"
        )
    inputs = {}
    for name in sorted(known & set(raw.inputs)):
        values = raw.inputs[name]
        if values.shape != shape:
            raise InvalidRequest(
                f"{field}.loss_fn_inputs.{name} has shape {list(values.shape)}; it must be that of {TARGETS}, {list(shape)}"
            )
        values = np.ascontiguousarray(values, dtype=np.float32)
        if not np.isfinite(values).all():
            raise InvalidRequest(f"{field}.loss_fn_inputs.{name} has NaN or infinite values; send finite numbers")
        inputs[name] = values
    return inputs
