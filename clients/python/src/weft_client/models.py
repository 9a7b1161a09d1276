"""Records of the service's answers. All are frozen, and ignore fields that a newer service has."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

GateMode = Literal["abort", "wait", "keep"]
"""``abort`` ends samples in flight, ``wait`` lets them end, ``keep`` holds them and goes on with them after the pause."""
OnStale = Literal["fail", "restart"]
Role = Literal["viewer", "member", "billing", "admin"]
Dimension = Literal["project", "session", "run", "key", "base_model", "kind"]
BucketWidth = Literal["1h", "1d"]


class Record(BaseModel):
    """Base of the records."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class PointInfo(Record):
    """An optimizer step of a run, the first being 1, and the passes since the step before."""

    step: int
    at: datetime
    mean_loss: float | None
    loss_sum: float | None
    loss_weight: float
    loss_per: str
    tokens: int
    learning_rate: float | None
    grad_norm: float | None
    sampling_kl: float | None
    sampled_tokens: int
    adapter_step: int | None


class Points(Record):
    """Points in order of their steps; number of the run's steps, and names of its own metrics."""

    points: list[PointInfo]
    optimizer_steps: int
    metrics: list[str]


class ValueInfo(Record):
    """Value of a metric at a step; None for one that was not finite."""

    step: int
    value: float | None
    at: datetime


class MetricValues(Record):
    """Values of one metric in order of their steps."""

    name: str
    values: list[ValueInfo]


class Recorded(Record):
    """Number of values that a request brought."""

    values: int


class GateState(Record):
    """State of an adapter's gate: ``open``, ``pausing`` or ``paused``; versions in flight on each replica."""

    adapter: str
    state: str
    generation: int
    mode: str | None
    reason: str | None
    since: datetime | None
    expires_at: datetime | None
    in_flight: int
    versions: dict[str, list[str]]


class Reloaded(Record):
    """Version that live samplers follow now."""

    adapter: str
    version: str


class StalenessInfo(Record):
    """Bound of a live sampler, and the number of versions that it has followed."""

    sampler_id: str
    max_version_lag: int | None
    on_stale: str | None
    publications: int


class Span(Record):
    """Tokens ``[start, end)`` of a sequence, all made by ``version``; None is the bare base."""

    version: str | None
    start: int
    end: int


class Sequence(Record):
    """A sampled sequence, and the weights that made its tokens."""

    stop_reason: str
    spans: list[Span]


class SampleInfo(Record):
    """Report on a finished sample."""

    request_id: str
    sequences: list[Sequence]
    min_version: str | None
    max_version: str | None
    replicas: list[str]
    attempts: int
    queue_seconds: float
    decode_seconds: float


class UsageInfo(Record):
    """Usage of a bucket; what was not asked for is None."""

    start: datetime
    project: str | None
    session: str | None
    run: str | None
    key: int | None
    base_model: str | None
    kind: str | None
    operations: int
    failed: int
    train_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    sampled_tokens: int


class Usage(Record):
    """A page of usage, and where the next one begins."""

    lines: list[UsageInfo]
    next_offset: int | None


class LimitReport(Record):
    """A limit and its use; ``used`` None for a limit of single requests."""

    name: str
    value: int
    used: int | None
    is_reached: bool
    is_own: bool
    reason: str


class StandingReport(Record):
    """Share of passes, and limits."""

    share: float
    limits: list[LimitReport]


class KeyBody(Record):
    """A key without its secret."""

    key_id: int
    prefix: str
    note: str
    role: str
    scopes: list[str]
    projects: list[str] | None
    base_models: list[str] | None
    max_rank: int | None
    networks: list[str] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class KeyList(Record):
    """Keys, oldest first."""

    keys: list[KeyBody]


class MadeKey(Record):
    """A new key with its secret, which is shown only now."""

    key_id: int
    prefix: str
    secret: Annotated[str, Field(repr=False)]


class ProjectBody(Record):
    """A project; ``created_at`` None for the default one."""

    id: str
    name: str
    created_at: datetime | None


class ProjectList(Record):
    """Projects, the default one first."""

    projects: list[ProjectBody]


class JobError(Record):
    """Reason why a job failed or was cancelled."""

    code: str
    message: str


class JobInfo(Record):
    """A merge or an import. ``path`` is what it made; ``total_bytes`` is 0 until it is known."""

    id: str
    kind: str
    state: str
    base_model: str
    path: str | None
    done_bytes: int
    total_bytes: int
    attempts: int
    created_at: datetime
    finished_at: datetime | None
    is_cancelling: bool
    error: JobError | None


class JobList(Record):
    """Jobs, newest first."""

    jobs: list[JobInfo]
