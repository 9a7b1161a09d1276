"""JSON request bodies, read leniently: SDKs from 0.3 to 0.38 leave out defaults, send nulls or leave out ``type``."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from api.wire.json_body import PlainText, RequestModel

MAX_SEQ_ID = 2**31 - 1
"""int32 on the wire."""
SeqId = Annotated[int, Field(ge=0, le=MAX_SEQ_ID)]
SampleSeqId = Annotated[int, Field(ge=0, le=2**62)]
"""Cloned samplers count from 1e9 times a random id."""
Metadata = dict[str, str]


class DefaultingModel(RequestModel):
    """A request, or part of one, in which an explicit null means the default."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class Chunk(RequestModel):
    """A piece of a prompt; only text (``tokens``) is taken, the rest is told by its own field."""

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
    """What to compute."""

    data: list[JsonDatum] = []
    loss_fn: str = ""
    loss_fn_config: dict[str, float | str] | None = None


class ModelKey(RequestModel):
    """The idempotency key of a training request, read before the rest."""

    model_id: PlainText
    seq_id: SeqId


class ForwardRequest(RequestModel):
    """``/forward``, or ``/forward_backward`` as JSON."""

    forward_input: ForwardInput | None = None
    forward_backward_input: ForwardInput | None = None


class LoraConfig(DefaultingModel):
    """LoRA settings with the SDK's defaults."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(DefaultingModel):
    """Which optimiser."""

    type: str = "adamw"


class CreateModelRequest(RequestModel):
    """``/create_model``."""

    session_id: PlainText
    model_seq_id: SeqId
    base_model: PlainText
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None


class ModelRequest(RequestModel):
    """``/get_info``, ``/unload_model``."""

    model_id: PlainText


class AdamParams(DefaultingModel):
    """AdamW with the SDK's defaults; old SDKs leave fields out."""

    type: str = "adamw"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(RequestModel):
    """``/optim_step``."""

    adam_params: AdamParams | None = None
    optimizer_params: AdamParams | None = None


class SaveWeightsRequest(RequestModel):
    """``/save_weights``."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool | None = None
    user_metadata: Metadata | None = None


class SaveWeightsForSamplerRequest(RequestModel):
    """``/save_weights_for_sampler``, named by ``path`` or not."""

    path: str | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] | None = None
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None


class LoadTarget(RequestModel):
    """Tells the forms of ``/load_weights`` apart: into a model (``model_id``, ``seq_id``), or making one without."""

    model_id: PlainText | None = None


class LoadWeightsRequest(DefaultingModel):
    """``/load_weights``: what both forms say."""

    path: PlainText = ""
    optimizer: bool | None = None
    base_model: PlainText | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None


class CreateByLoadRequest(LoadWeightsRequest):
    """The form of ``/load_weights`` that makes a model."""

    session_id: PlainText
    model_seq_id: SeqId


class WeightsInfoRequest(RequestModel):
    """``/weights_info``."""

    tinker_path: PlainText


class CreateSamplingSessionRequest(RequestModel):
    """``/create_sampling_session``."""

    session_id: PlainText
    sampling_session_seq_id: SeqId
    base_model: PlainText | None = None
    model_path: PlainText | None = None


class JsonSamplingParams(RequestModel):
    """How tokens are drawn; nulls are defaults."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class AsampleRequest(RequestModel):
    """``/asample``."""

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
