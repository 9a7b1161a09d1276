"""Tinker's JSON request bodies that several endpoint files or a codec read.

Bodies are read leniently: SDKs from 0.3 to 0.38 leave out defaults, send nulls for them, or leave out ``type``.
"""

from typing import Annotated, Any

from pydantic import Field

from api.wire.request_model import DefaultingModel, PlainText, RequestModel

MAX_SEQ_ID = 2**31 - 1
"""Largest ``seq_id`` of a run: int32 on the wire."""
SeqId = Annotated[int, Field(ge=0, le=MAX_SEQ_ID)]
SampleSeqId = Annotated[int, Field(ge=0, le=2**62)]
"""``seq_id`` of a sample. Cloned samplers count from 1e9 times a random id, beyond int32."""
Metadata = dict[str, str]


class Chunk(RequestModel):
    """A piece of a sequence. Text has ``tokens``; images and audio have other fields and are refused."""

    tokens: list[int] | None = None


class ModelInput(RequestModel):
    """A sequence in pieces."""

    chunks: list[Chunk] = []


class JsonTensor(RequestModel):
    """A dense or CSR tensor as lists."""

    data: list[int] | list[float] = []
    dtype: str = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class JsonDatum(RequestModel):
    """A sequence and its loss inputs."""

    model_input: ModelInput = ModelInput()
    loss_fn_inputs: dict[str, JsonTensor] = {}


class ForwardInput(RequestModel):
    """Data and loss of a pass."""

    data: list[JsonDatum] = []
    loss_fn: str = ""
    loss_fn_config: dict[str, float | str] | None = None


class ModelKey(RequestModel):
    """Idempotency key of a training request, read before the rest of its body."""

    model_id: PlainText
    seq_id: SeqId


class OptimizerConfig(DefaultingModel):
    """Kind of optimiser of a new model."""

    type: str = "adamw"


class JsonSamplingParams(RequestModel):
    """Settings for drawing tokens; nulls are defaults."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
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
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int | None = None
    record_stability_info: bool | None = None
