"""Conversion of training requests to typed records that are checked against loss and base model.

A request is a protobuf message, or JSON from an old SDK.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from google.protobuf.message import DecodeError

from api.wire import tensors
from api.wire import weft_wire_pb2 as pb
from api.wire.model_input import text_only, tokens_of
from api.wire.protobuf_counts import check_field_count, layout_of, parted
from api.wire.tensors import ExpansionBudget
from api.wire.tinker_requests import MAX_SEQ_ID, ForwardInput, JsonDatum
from api.wire.token_ids import check_token_ids, joined
from contracts.base_model import BaseModelFacts
from contracts.custom_loss import LOSS_ID, TARGETS, CustomLoss, check_inputs, read_custom_loss
from contracts.errors import InvalidRequest
from contracts.losses import CLIP_HIGH, CLIP_LOW, LOSS_RULES, SAMPLING_LOGPROBS, WITHOUT_ADAPTER, LossName
from contracts.operations import Datum, LossSpec, TrainingBatch
from contracts.provenance_spans import Provenance, Span
from store.settings import Settings

MOST_FIELDS = 131_072
"""Most protobuf fields of a request, at all depths. A request of the SDK, 1,024 sequences with four inputs, has 37,000."""
MOST_HEAD_BYTES = 2**20
"""Most bytes of a request beside its data: names and the loss's settings."""
MOST_POSITION_BYTES = 2048
"""Most bytes of a datum for each token of the context: its id, and loss inputs for up to a hundred targets."""
_SMALL_DATUM_BYTES = 2**20
"""Bytes that a datum may have whatever the context: names of inputs, provenance."""
_LAYOUT = layout_of(pb.ForwardBackwardRequest)
_DATA = pb.ForwardBackwardRequest.DATA_FIELD_NUMBER
_MODEL_ID_TAG = 1 << 3 | 2
_SEQ_ID_TAG = 2 << 3 | 0
"""Protobuf field tags of the first two fields of ``ForwardBackwardRequest``."""


@dataclass(frozen=True, slots=True)
class RawDatum:
    """A datum as received: token ids int64 (N,), named arrays and provenance spans. Only the number of tokens is checked."""

    tokens: np.ndarray
    inputs: dict[str, np.ndarray]
    provenance: Provenance | None = None


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A forward or forward_backward request as received: parsed but not checked."""

    loss: str
    config: Mapping[str, float | str]
    data: list[RawDatum]


@dataclass(frozen=True, slots=True)
class ProtobufPass:
    """A protobuf request. ``head`` is parsed and has no data; ``data`` tells where each datum is in ``body``.

    Each datum is parsed alone: a parser holds the interpreter's lock from the first to the last byte of a message.
    """

    body: bytes
    head: pb.ForwardBackwardRequest
    data: list[slice]

    def datum(self, number: int, most: int) -> pb.Datum:
        """Return the datum. Raises ``InvalidRequest`` for one of more than ``most`` bytes, or no ``Datum`` message."""
        place = self.data[number]
        if (size := place.stop - place.start) > most:
            raise InvalidRequest(
                f"data[{number}] has {size} bytes, more than a sequence of this base can have ({most}); send shorter sequences"
            )
        try:
            return pb.Datum.FromString(self.body[place])
        except DecodeError as error:
            raise InvalidRequest(f"data[{number}] is no Datum protobuf message") from error


def parse_proto(body: bytes) -> ProtobufPass:
    """Read the request but for its data. Raises ``InvalidRequest`` unless it is a message of ``MOST_FIELDS``."""
    check_field_count(body, _LAYOUT, MOST_FIELDS)
    head, data = parted(body, _DATA, MOST_HEAD_BYTES)
    try:
        return ProtobufPass(body, pb.ForwardBackwardRequest.FromString(head), data)
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


def raw_from_proto(request: ProtobufPass, facts: BaseModelFacts, settings: Settings) -> RawBatch:
    """Return the arrays of a protobuf request. Raises ``InvalidRequest`` naming the field."""
    budget, message = ExpansionBudget(settings.max_body_bytes), request.head
    config: dict[str, float | str] = dict(message.loss_fn_config)
    if message.loss_fn_config_v2:
        config = {
            key: value.text if value.WhichOneof("value") == "text" else value.number
            for key, value in message.loss_fn_config_v2.items()
        }
    data = []
    most = _SMALL_DATUM_BYTES + MOST_POSITION_BYTES * facts.context_length
    for number in range(len(request.data)):
        field, datum = f"data[{number}]", request.datum(number, most)
        pieces = []
        for chunk in datum.model_input:
            if chunk.WhichOneof("chunk") != "encoded_text":
                raise text_only(f"{field}.model_input", facts)
            if len(chunk.encoded_text.tokens) % 4:
                raise InvalidRequest(f"{field}.model_input: tokens must be int32 values of 4 bytes")
            pieces.append(np.frombuffer(chunk.encoded_text.tokens, dtype="<i4"))
        # Before the next one is parsed: what is refused anyhow takes the memory of one sequence.
        _check_length(sum(map(len, pieces)), field, facts)
        inputs = {
            name: tensors.from_proto(tensor, f"{field}.loss_fn_inputs.{name[:100]}", budget)
            for name, tensor in datum.loss_fn_inputs.items()
        }
        data.append(RawDatum(joined(pieces), inputs, _provenance(datum)))
    return RawBatch(message.loss_fn, config, data)


def _provenance(datum: pb.Datum) -> Provenance | None:
    if not (datum.model_input_spans or datum.loss_fn_input_spans):
        return None
    return Provenance(_spans(datum.model_input_spans), _spans(datum.loss_fn_input_spans))


def _spans(messages: Iterable[pb.ProvenanceSpan]) -> list[Span]:
    found = []
    for message in messages:
        is_sampled = message.WhichOneof("span") == "sampled_tokens"
        span = message.sampled_tokens if is_sampled else message.prompt_tokens
        found.append(Span(span.sequence_id, span.offset, span.length, is_sampled))
    return found


def raw_from_json(request: ForwardInput, facts: BaseModelFacts, settings: Settings) -> RawBatch:
    """Return the arrays of a JSON request. Raises ``InvalidRequest`` naming the field."""
    budget = ExpansionBudget(settings.max_body_bytes)
    data = [_json_datum(datum, f"data[{number}]", facts, budget) for number, datum in enumerate(request.data)]
    return RawBatch(request.loss_fn, dict(request.loss_fn_config or {}), data)


def _json_datum(datum: JsonDatum, field: str, facts: BaseModelFacts, budget: ExpansionBudget) -> RawDatum:
    tokens = tokens_of(datum.model_input, f"{field}.model_input", facts)
    _check_length(len(tokens), field, facts)
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
    return RawDatum(tokens, inputs)


def check_batch(raw: RawBatch, facts: BaseModelFacts, settings: Settings, *, backward: bool = False) -> TrainingBatch:
    """Check the request and return its payload. Raises ``InvalidRequest`` naming the field and the limit."""
    without_adapter = _without_adapter(raw, backward=backward)
    loss = _loss(raw)
    custom = read_custom_loss(loss.loss_id) if loss.name is LossName.CUSTOM else None
    if not raw.data:
        raise InvalidRequest("data is empty; send at least one datum")
    if len(raw.data) > settings.max_datums:
        raise InvalidRequest(f"data has {len(raw.data)} items; send at most {settings.max_datums} in one request")
    data = [_datum(datum, f"data[{number}]", loss, facts, settings) for number, datum in enumerate(raw.data)]
    if custom is not None:
        data = [
            _with_custom_inputs(datum, given.inputs, custom, f"data[{number}]")
            for number, (datum, given) in enumerate(zip(data, raw.data, strict=True))
        ]
    spans = [_checked_provenance(datum, f"data[{number}]", loss) for number, datum in enumerate(raw.data)]
    return TrainingBatch(loss, data, without_adapter, spans if any(spans) else None)


def _with_custom_inputs(datum: Datum, given: Mapping[str, np.ndarray], loss: CustomLoss, field: str) -> Datum:
    """Return the datum with the inputs that the loss reads, float32 or int64. Others may come along: the loss ignores them."""
    inputs = {}
    for name, rank in loss.inputs[1:]:
        if name == TARGETS or name not in given:
            continue
        # A scalar comes without a shape, as a vector of one does.
        values = given[name].reshape(()) if rank == 0 and given[name].size == 1 else given[name]
        inputs[name] = np.ascontiguousarray(values, np.int64 if values.dtype.kind == "i" else np.float32).reshape(
            values.shape
        )
    check_inputs(loss, datum.targets, inputs, field)
    return replace(datum, inputs=inputs)


def _without_adapter(raw: RawBatch, *, backward: bool) -> bool:
    """Return whether the batch asks for the bare base. Raises ``InvalidRequest`` where that cannot be."""
    value = raw.config.get(WITHOUT_ADAPTER, 0)
    if value not in (0, 1):
        raise InvalidRequest(f"loss_fn_config.{WITHOUT_ADAPTER} must be 1 for the base model, or 0 for the adapter")
    if value and backward:
        raise InvalidRequest(
            f"loss_fn_config.{WITHOUT_ADAPTER}: the base model itself is not trained; call forward instead of forward_backward"
        )
    return bool(value)


def _loss(raw: RawBatch) -> LossSpec:
    try:
        name = LossName(raw.loss)
    except ValueError:
        raise InvalidRequest(
            f"loss_fn {raw.loss[:100]!r} is unknown here; choose one of: {', '.join(LossName)}"
        ) from None
    rule = LOSS_RULES[name]
    if name is LossName.CUSTOM:
        return LossSpec(name, loss_id=_loss_id(raw))
    config: dict[str, float] = {}
    for key, value in raw.config.items():
        if key == WITHOUT_ADAPTER:
            continue
        if key not in rule.config:
            known = ", ".join(rule.config) or "none"
            raise InvalidRequest(f"loss_fn_config: {key[:100]!r} is no setting of {name}; its settings: {known}")
        if isinstance(value, str) or not np.isfinite(value):
            raise InvalidRequest(f"loss_fn_config.{key} must be a finite number")
        config[key] = float(value)
    rule.check_config(config)
    return LossSpec(name, config)


def _loss_id(raw: RawBatch) -> str:
    loss_id = raw.config.get(LOSS_ID)
    if not isinstance(loss_id, str) or set(raw.config) - {LOSS_ID, WITHOUT_ADAPTER}:
        raise InvalidRequest(
            f"loss_fn_config must be {{{LOSS_ID!r}: …}} for a custom loss, with the id of create_custom_loss"
        )
    return loss_id


def _check_length(length: int, field: str, facts: BaseModelFacts) -> None:
    if length == 0:
        raise InvalidRequest(f"{field}.model_input is empty; send at least one token")
    if length > facts.context_length:
        raise InvalidRequest(
            f"{field}.model_input has {length} tokens; the context of {facts.name} holds {facts.context_length}: shorten it"
        )


def _datum(raw: RawDatum, field: str, loss: LossSpec, facts: BaseModelFacts, settings: Settings) -> Datum:
    length = len(raw.tokens)
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


def _is_named(raw: RawDatum, loss: LossSpec) -> bool:
    """Return whether the datum's sampling logprobs are those of the samples that it names."""
    return raw.provenance is not None and loss.name is LossName.STABLE_REINFORCE


def _checked_provenance(raw: RawDatum, field: str, loss: LossSpec) -> Provenance | None:
    """Return the spans that name where the datum's tokens come from, None without any or for a loss that reads none."""
    if raw.provenance is None or not _is_named(raw, loss):
        return None
    targets = raw.inputs[TARGETS]
    if targets.ndim != 1:
        raise InvalidRequest(f"{field}: provenance spans need {TARGETS} of one token at each position")
    for name, spans in (("model_input_spans", raw.provenance.tokens), ("loss_fn_input_spans", raw.provenance.targets)):
        if any(span.offset < 0 or span.length < 0 or "\0" in span.sequence_id for span in spans):
            raise InvalidRequest(f"{field}.{name}: offset and length must be 0 or more, and sequence_id a sample's")
        if (covered := sum(span.length for span in spans)) != len(targets):
            raise InvalidRequest(f"{field}.{name} cover {covered} tokens; they must cover all {len(targets)} in order")
    # An empty span would have a record read for nothing.
    named = ([span for span in spans if span.length] for spans in (raw.provenance.tokens, raw.provenance.targets))
    return Provenance(*named)


def _loss_inputs(raw: RawDatum, field: str, loss: LossSpec, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return the float32 inputs that the loss uses, each of ``shape``.

    Inputs that the loss does not know are refused, except by cross_entropy: custom losses of old SDKs send some along.
    """
    if loss.name is LossName.CUSTOM:
        return {}
    rule = LOSS_RULES[loss.name]
    recorded = {SAMPLING_LOGPROBS} if _is_named(raw, loss) else set()
    missing = [name for name in rule.required if name not in raw.inputs and name not in recorded]
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
    if CLIP_LOW in known:
        _check_thresholds(inputs, {**rule.config, **loss.config}, field)
    return inputs


def _check_thresholds(inputs: Mapping[str, np.ndarray], config: Mapping[str, float], field: str) -> None:
    """Refuse clipping between thresholds of which the low one is above the high one, for all tokens or for some."""
    low, high = (np.asarray(inputs.get(name, config[name])) for name in (CLIP_LOW, CLIP_HIGH))
    if (low > high).any():
        raise InvalidRequest(
            f"{field}: {CLIP_LOW} is above {CLIP_HIGH}, so that no ratio is between them; "
            f"they are limits of the ratio itself, {config[CLIP_LOW]:g} and {config[CLIP_HIGH]:g} unless tokens bring their own"
        )
