"""Payloads and results of operations (accepted requests). The API records a payload, the engine computes its result.

Every record is a frozen dataclass, encoded by ``contracts.codec``. Arrays are C-contiguous numpy arrays. Shapes use
N (positions of a sequence), K (targets at a position), P (prompt tokens) and T (sampled tokens).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np

from contracts.logit_rules import LogitRules
from contracts.losses import LossName
from contracts.prompt_cells import PromptAltTokens, PromptCells
from contracts.provenance_spans import Provenance
from contracts.stored_words import known


class OperationKind(StrEnum):
    """Kind of an operation, by the name that the wire and the logs use."""

    CREATE_MODEL = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_WEIGHTS_EXTERNAL = "save_weights_external"
    LOAD_WEIGHTS = "load_weights"
    UNLOAD_MODEL = "unload_model"
    SAMPLE = "sample"
    UNKNOWN = "unknown"
    """A recorded kind that this version does not know. Nothing is accepted as one."""


def known_kind(name: str) -> OperationKind:
    """Return the kind of that name, or ``UNKNOWN``."""
    return known(OperationKind, name, OperationKind.UNKNOWN)


DEFAULT_ALPHA = 32.0


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings of a new adapter. Its scaling is ``alpha / rank``. ``seed`` None means a random initialisation."""

    rank: int
    alpha: float = DEFAULT_ALPHA
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence.

    - ``tokens``: int64 (N,).
    - ``targets``: int64 (N,) or (N, K). Position i predicts ``targets[i]``.
    - ``inputs``: float32 arrays of the shape of ``targets``. They hold weights, or logprobs and advantages, and optionally
      ``clip_low_threshold`` and ``clip_high_threshold`` for each token. The API makes sparse (CSR) inputs dense.
      A custom loss reads float32 or int64 arrays of its own shapes.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss and its config numbers. The engine has defaults for absent keys. ``loss_id``: a custom loss's, else empty."""

    name: LossName
    config: dict[str, float] = field(default_factory=dict)
    loss_id: str = ""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Payload of ``forward`` and ``forward_backward``. ``without_adapter``: a ``forward`` of the bare base.

    ``provenance``: each datum's spans, whose samples' logprobs are to be read; None once they are, or without any.
    """

    loss: LossSpec
    data: list[Datum]
    without_adapter: bool = False
    provenance: list[Provenance | None] | None = None


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Payload of ``create_model``."""

    base_model: str
    lora: LoraSettings
    user_metadata: dict[str, str] | None = None


class OptimizerName(StrEnum):
    """Optimizers of the SDK's wire. A run has one for its whole life."""

    ADAMW = "adamw"
    DIMUON = "dimuon"


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Payload of ``optim_step``. ``grad_clip_norm`` <= 0 means no clipping.

    AdamW has decoupled weight decay. Dimuon reads ``learning_rate``, ``beta1`` and ``grad_clip_norm``; the other fields have
    their defaults.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    optimizer: OptimizerName = OptimizerName.ADAMW


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """Payload of ``save_weights``: a training checkpoint (weights and optimiser state)."""

    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsForSampler:
    """Payload of ``save_weights_for_sampler``. With ``name`` None the save makes the sampler ``sampling_session_seq_id``."""

    name: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsExternal:
    """Payload of ``save_weights_external``: PEFT's files, each encrypted to ``age_recipients`` if there are any."""

    name: str
    ttl_seconds: int | None = None
    age_recipients: list[str] | None = None


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Payload of ``load_weights``.

    - ``creates``: the operation also creates the run (its seq_id is 0).
    - ``granted``: id of the checkpoint that the request was given access to; None: ``path`` is looked up in its turn.
    """

    path: str
    optimizer: bool
    creates: bool
    user_metadata: dict[str, str] | None = None
    granted: str | None = None


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Payload of ``unload_model``."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stand-in for a recorded payload that cannot be decoded. ``reason`` is for the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling.

    - ``max_tokens``: None means up to the context length.
    - ``stop_strings``, ``stop_tokens``: with both None the model's end-of-sequence tokens stop. If either is given, even
      empty, only the given ones stop.
    - ``temperature``: 0 is greedy (``contracts.temperatures``). ``top_k``: -1 is off.

    Reported logprobs are of the model's own distribution: temperature 1, no truncation.
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
    """Payload of ``sample``.

    - ``prompt``: int64 (P,), P >= 1.
    - ``target_prompt_logprobs``: tokens whose logprobs to report at the prompt's positions.
    - ``prompt_alt_tokens_k``: number of tokens to draw at each of the prompt's positions after the first.
    - ``trajectory``: key of the conversation that the sample is a turn of; turns of one key draw on one replica.
    - ``is_recorded``: tokens and logprobs are recorded for training that names the sequences.
    - ``logit_rules``: None for none, as in what older versions have recorded.
    """

    prompt: np.ndarray
    num_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: PromptCells | None = None
    prompt_alt_tokens_k: int = 0
    trajectory: str | None = None
    is_recorded: bool = False
    logit_rules: LogitRules | None = None

    @property
    def in_one_piece(self) -> bool:
        """True if each sequence must be drawn by one request: a replica forgets what the rules look back on."""
        return self.logit_rules is not None and self.logit_rules.look_back


@dataclass(frozen=True, slots=True)
class TopkLogprobs:
    """Table of the likeliest tokens at each position: ``token_ids`` int32 (length, k), ``logprobs`` float32 (length, k).

    Empty cells hold id 0 and ``EMPTY_LOGPROB``. A position whose first cell is empty was not asked for, as on the SDK's wire.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray


EMPTY_LOGPROB = -99999.0
"""Logprob in a cell of ``TopkLogprobs`` that holds no token."""


def empty_topk(length: int, k: int) -> TopkLogprobs:
    """Return a table (length, k) of empty cells."""
    return TopkLogprobs(np.zeros((length, k), np.int32), np.full((length, k), EMPTY_LOGPROB, np.float32))


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled sequence: ``tokens`` int32 (T,), ``logprobs`` float32 (T,). Stop tokens and stop strings are included."""

    stop_reason: Literal["stop", "length"]
    tokens: np.ndarray
    logprobs: np.ndarray
    topk_logprobs: TopkLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Result of ``sample``.

    - ``prompt_logprobs``: float32 (P,), NaN where absent, as index 0 always is.
    - ``prompt_cache_hit_tokens``: tokens of the prompt that the replica had computed for an earlier request.
    - ``target_prompt_logprobs``: logprobs in the layout of the request's tokens.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    prompt_cache_hit_tokens: int = 0
    target_prompt_logprobs: PromptCells | None = None
    prompt_alt_tokens: PromptAltTokens | None = None

    @property
    def drawn(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(one.tokens) for one in self.sequences)


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """Result of ``forward`` and ``forward_backward``. ``logprobs[i]``: float32 with the shape of datum i's targets.

    Each metric's name has exactly one colon (``loss:sum``). The SDK reduces over chunks by the suffix.
    """

    logprobs: list[np.ndarray]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ModelCreated:
    """Result of ``create_model``."""

    model_id: str


@dataclass(frozen=True, slots=True)
class OptimStepped:
    """Result of ``optim_step``. Metrics are finite numbers."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class WeightsSaved:
    """Result of ``save_weights``: a ``tinker://`` path."""

    path: str


@dataclass(frozen=True, slots=True)
class ExternalWeightsSaved:
    """Result of ``save_weights_external``: a ``tinker://`` path, and the size of its files in bytes."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SamplerWeightsSaved:
    """Result of ``save_weights_for_sampler``: ``path`` if the payload had a name, else ``sampling_session_id``."""

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
    | SaveWeightsExternal
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
    | ExternalWeightsSaved
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
    OperationKind.SAVE_WEIGHTS_EXTERNAL: SaveWeightsExternal,
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
    OperationKind.SAVE_WEIGHTS_EXTERNAL: ExternalWeightsSaved,
    OperationKind.LOAD_WEIGHTS: WeightsLoaded,
    OperationKind.UNLOAD_MODEL: ModelUnloaded,
    OperationKind.SAMPLE: SampleOutput,
}
