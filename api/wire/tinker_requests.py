"""Tinker's JSON request bodies that several endpoint files or a codec read.

Bodies are read leniently: SDKs from 0.3 to 0.38 leave out defaults, send nulls for them, or leave out ``type``. Numbers in
lists are numbers: texts of digits are not read as such.
"""

import json
import re
from typing import Annotated

import msgspec
from pydantic import ConfigDict, Field, StrictFloat, StrictInt

from api.wire.json_counts import DATA
from api.wire.request_model import BodyPart, DefaultingModel, ListOf, MapOf, PlainText, RequestModel, parse_json
from contracts.errors import InvalidRequest
from contracts.operations import OptimizerName

MAX_SEQ_ID = 2**31 - 1
"""Largest ``seq_id`` of a run: int32 on the wire."""
SeqId = Annotated[int, Field(ge=0, le=MAX_SEQ_ID)]
SampleSeqId = Annotated[int, Field(ge=0, le=2**62)]
"""``seq_id`` of a sample. Cloned samplers count from 1e9 times a random id, beyond int32."""
_MODEL_ID = re.compile(rb'"model_id"[ ]*:[ ]*"([\x21\x23-\x5b\x5d-\x7e]{1,200})"')
_SEQ_ID = re.compile(rb'"seq_id"[ ]*:[ ]*([0-9]{1,10})[ ]*[,}]')


class Chunk(BodyPart):
    """A piece of a sequence. Text has ``tokens``; images and audio have other fields and are refused."""

    tokens: ListOf[StrictInt] | None = None


class ModelInput(BodyPart):
    """A sequence in pieces."""

    chunks: ListOf[Chunk] = []


_NO_INPUT = ModelInput()
"""Default of a datum. A default that is no factory would be copied in depth for each datum."""


class JsonTensor(BodyPart):
    """A dense or CSR tensor as lists."""

    model_config = ConfigDict(allow_inf_nan=True)

    data: ListOf[StrictFloat] = []
    dtype: str = "float32"
    shape: ListOf[StrictInt] | None = None
    sparse_crow_indices: ListOf[StrictInt] | None = None
    sparse_col_indices: ListOf[StrictInt] | None = None


class JsonDatum(BodyPart):
    """A sequence and its loss inputs."""

    model_input: ModelInput = Field(default_factory=lambda: _NO_INPUT)
    loss_fn_inputs: MapOf[JsonTensor] = {}


class ForwardInput(BodyPart):
    """Data and loss of a pass."""

    data: ListOf[JsonDatum] = []
    loss_fn: str = ""
    loss_fn_config: MapOf[float | str] | None = None


class ModelKey(RequestModel):
    """Idempotency key of a training request, read before the rest of its body."""

    model_id: PlainText
    seq_id: SeqId


class _KeyAlone(msgspec.Struct):
    """The two fields of ``ModelKey``, read past all others."""

    model_id: str
    seq_id: int


def model_key(body: bytes) -> ModelKey:
    """Return the key of a training request; the rest of ``body`` is skipped. Raises ``InvalidRequest`` naming the field."""
    try:
        found = msgspec.json.decode(body, type=_KeyAlone)
    except (msgspec.DecodeError, RecursionError):
        return parse_json(ModelKey, body, DATA)
    return parse_json(ModelKey, json.dumps(msgspec.structs.asdict(found)).encode())


def key_of_json_beginning(beginning: bytes) -> tuple[str, int] | None:
    """Return ``model_id`` and ``seq_id`` from the first bytes of a training request whose rest was not read, or None.

    SDKs since 0.25 send both before any field that may be large. They are looked for before the first nested object.
    """
    fields = b"".join(beginning.split(b"{", 2)[1:2])
    model_id, seq_id = _MODEL_ID.search(fields), _SEQ_ID.search(fields)
    if model_id is None or seq_id is None or int(seq_id[1]) > MAX_SEQ_ID:
        return None
    return model_id[1].decode("ascii"), int(seq_id[1])


class OptimizerConfig(DefaultingModel):
    """Kind of optimiser of a new model."""

    type: str = "adamw"


def optimizer_of(kind: str, field: str) -> OptimizerName:
    """Return the optimizer that the wire calls ``kind``. Raises ``InvalidRequest``, naming ``field``."""
    try:
        return OptimizerName.ADAMW if kind == "adam" else OptimizerName(kind)
    except ValueError:
        raise InvalidRequest(f"{field} {kind[:50]!r} is not offered; send {' or '.join(OptimizerName)}") from None


class JsonSamplingParams(BodyPart):
    """Settings for drawing tokens; nulls are defaults."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | ListOf[str] | ListOf[int] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class AsampleRequest(RequestModel):
    """Body of ``/asample`` and ``/stream_sample``."""

    sampling_session_id: PlainText | None = None
    seq_id: SampleSeqId | None = None
    num_samples: int | None = None
    prompt: ModelInput = ModelInput()
    sampling_params: JsonSamplingParams | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int | None = None
    topk_sample_logprobs: int | None = None
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int | None = None
    record_stability_info: bool | None = None
    trajectory: PlainText | None = None
