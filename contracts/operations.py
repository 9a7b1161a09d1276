"""Payloads and results of operations: what the API records and the engine computes.

Every record is a frozen dataclass, encoded by ``contracts.codec``. Arrays are C-contiguous numpy arrays;
shapes use N (positions of a sequence), K (targets a position), V (vocabulary).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np

from contracts.losses import LossName


class OperationKind(StrEnum):
    """What an operation does; the name the wire and the logs use."""

    CREATE_MODEL = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    LOAD_WEIGHTS = "load_weights"
    UNLOAD_MODEL = "unload_model"
    SAMPLE = "sample"


DEFAULT_ALPHA = 32.0


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """How an adapter is made. ``seed`` None means a fresh random initialisation; scaling is ``alpha / rank``."""

    rank: int
    alpha: float = DEFAULT_ALPHA
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence: ``tokens`` int64 (N,), ``targets`` int64 (N,) or (N, K), position i predicts ``targets[i]``.

    ``inputs`` are float32 arrays of the shape of ``targets``: weights, or logprobs and advantages, and optional
    per-token ``clip_low_threshold``/``clip_high_threshold``. CSR inputs arrive here already dense.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss and its config numbers (defaults are the engine's when a key is absent)."""

    name: LossName
    config: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Payload of ``forward`` and ``forward_backward``."""

    loss: LossSpec
    data: list[Datum]


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Payload of ``create_model``."""

    base_model: str
    lora: LoraSettings
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Payload of ``optim_step``: AdamW (decoupled decay); ``grad_clip_norm`` <= 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """Payload of ``save_weights``: a training checkpoint (weights and optimiser state)."""

    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsForSampler:
    """Payload of ``save_weights_for_sampler``. ``name`` None makes a sampler named by ``sampling_session_seq_id``."""

    name: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Payload of ``load_weights``; ``creates`` when the operation also creates the run (seq 0)."""

    path: str
    optimizer: bool
    creates: bool
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Payload of ``unload_model``."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    ``max_tokens`` None: up to the context. ``stop_strings``/``stop_tokens`` both None: the model's end-of-sequence
    tokens stop; either one given (even empty): only those stop. ``temperature`` 0 is greedy; ``top_k`` -1 is off.
    Reported logprobs are those of the unscaled model distribution (temperature 1, no truncation).
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop_strings: list[str] | None = None
    stop_tokens: list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Payload of ``sample``. ``prompt`` int64 (P,), P >= 1."""

    prompt: np.ndarray
    num_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None


@dataclass(frozen=True, slots=True)
class TopkLogprobs:
    """``token_ids`` int32 (length, k), ``logprobs`` float32 (length, k).

    Empty cells hold id 0 and ``EMPTY_LOGPROB``; a row starting with one means "not asked", as on the SDK's wire.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray


EMPTY_LOGPROB = -99999.0
"""Of a cell of ``TopkLogprobs`` that holds no token."""


def empty_topk(length: int, k: int) -> TopkLogprobs:
    """A table (length, k) whose cells are all empty."""
    return TopkLogprobs(np.zeros((length, k), np.int32), np.full((length, k), EMPTY_LOGPROB, np.float32))


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """``tokens`` int32 (T,), ``logprobs`` float32 (T,). A stop token is included; the text of a stop string too."""

    stop_reason: Literal["stop", "length"]
    tokens: np.ndarray
    logprobs: np.ndarray
    topk_logprobs: TopkLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Result of ``sample``: ``prompt_logprobs`` float32 (P,), NaN where absent (always index 0)."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    prompt_cache_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """Result of ``forward``/``forward_backward``: ``logprobs[i]`` float32 of datum i's target shape.

    Metric names carry exactly one colon (``loss:sum``): the SDK reduces over chunks by the suffix.
    """

    logprobs: list[np.ndarray]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ModelCreated:
    """Result of ``create_model``."""

    model_id: str


@dataclass(frozen=True, slots=True)
class OptimStepped:
    """Result of ``optim_step``: finite numbers only."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class WeightsSaved:
    """Result of ``save_weights``: a ``tinker://`` path."""

    path: str


@dataclass(frozen=True, slots=True)
class SamplerWeightsSaved:
    """Result of ``save_weights_for_sampler``: ``path`` when named, else ``sampling_session_id``."""

    path: str | None = None
    sampling_session_id: str | None = None


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """Result of ``load_weights``."""

    path: str
    model_id: str


@dataclass(frozen=True, slots=True)
class ModelUnloaded:
    """Result of ``unload_model``."""

    model_id: str


Payload = (
    CreateModel
    | TrainingBatch
    | OptimStep
    | SaveWeights
    | SaveWeightsForSampler
    | LoadWeights
    | UnloadModel
    | SampleRequest
)

Result = (
    ModelCreated
    | ForwardBackwardOutput
    | OptimStepped
    | WeightsSaved
    | SamplerWeightsSaved
    | WeightsLoaded
    | ModelUnloaded
    | SampleOutput
)

PAYLOAD_TYPES: dict[OperationKind, type[Payload]] = {
    OperationKind.CREATE_MODEL: CreateModel,
    OperationKind.FORWARD: TrainingBatch,
    OperationKind.FORWARD_BACKWARD: TrainingBatch,
    OperationKind.OPTIM_STEP: OptimStep,
    OperationKind.SAVE_WEIGHTS: SaveWeights,
    OperationKind.SAVE_WEIGHTS_FOR_SAMPLER: SaveWeightsForSampler,
    OperationKind.LOAD_WEIGHTS: LoadWeights,
    OperationKind.UNLOAD_MODEL: UnloadModel,
    OperationKind.SAMPLE: SampleRequest,
}

RESULT_TYPES: dict[OperationKind, type[Result]] = {
    OperationKind.CREATE_MODEL: ModelCreated,
    OperationKind.FORWARD: ForwardBackwardOutput,
    OperationKind.FORWARD_BACKWARD: ForwardBackwardOutput,
    OperationKind.OPTIM_STEP: OptimStepped,
    OperationKind.SAVE_WEIGHTS: WeightsSaved,
    OperationKind.SAVE_WEIGHTS_FOR_SAMPLER: SamplerWeightsSaved,
    OperationKind.LOAD_WEIGHTS: WeightsLoaded,
    OperationKind.UNLOAD_MODEL: ModelUnloaded,
    OperationKind.SAMPLE: SampleOutput,
}
