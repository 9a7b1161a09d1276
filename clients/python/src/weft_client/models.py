"""Records of the service's answers. All are frozen, and read those of other versions.

Fields that a newer service has are ignored, and a field with a fixed set of words is a ``str``: there may be more of them.
One that may be None is, where an older service does not send it.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

# isort: off
from weft_client.sampling_models import (
    AdapterList as AdapterList,
    AheadInfo as AheadInfo,
    ClientExceptionInfo as ClientExceptionInfo,
    ClientExceptionList as ClientExceptionList,
    Cursor as Cursor,
    GateState as GateState,
    OperationList as OperationList,
    OwnOperation as OwnOperation,
    Record as Record,
    Reloaded as Reloaded,
    SampleInfo as SampleInfo,
    SampleList as SampleList,
    SampleSummary as SampleSummary,
    Sequence as Sequence,
    Span as Span,
    StalenessInfo as StalenessInfo,
    UsedVersion as UsedVersion,
    WaitingInfo as WaitingInfo,
)
from weft_client.standing_models import (
    AlertReport as AlertReport,
    BudgetReport as BudgetReport,
    LimitReport as LimitReport,
    MoneyAlertReport as MoneyAlertReport,
    MoneyBudgetReport as MoneyBudgetReport,
    Period as Period,
    ProjectLimitReport as ProjectLimitReport,
    ProjectReport as ProjectReport,
    RateReport as RateReport,
    RequestRateReport as RequestRateReport,
    StandingReport as StandingReport,
)
from weft_client.webhook_models import (
    WebhookBody as WebhookBody,
    WebhookEventBody as WebhookEventBody,
    WebhookEventList as WebhookEventList,
    WebhookList as WebhookList,
    WebhookSecretBody as WebhookSecretBody,
)
# isort: on

GateMode = Literal["abort", "wait", "keep"]
"""``abort`` ends samples in flight, ``wait`` lets them end, ``keep`` holds them and goes on with them after the pause."""
OnStale = Literal["fail", "restart"]
SwapPolicy = Literal["continue", "finish"]
Role = Literal["viewer", "member", "billing", "admin"]
Dimension = Literal["project", "session", "run", "key", "base_model", "kind"]
BucketWidth = Literal["1h", "1d"]
ListedState = Literal["creating", "ready", "ended", "unloaded", "failed"]
RunFilter = Literal["project_id", "base_model", "state", "text", "metadata"]
CheckpointType = Literal["training", "sampler", "external"]
OperationState = Literal["pending", "done", "failed"]
PriceMeter = Literal["train_tokens", "prompt_tokens", "cached_prompt_tokens", "sampled_tokens", "storage"]
ServiceClass = Literal["interactive", "standard", "batch"]
SuspendMode = Literal["hold", "read_only", "blocked"]
GateOf = Literal["adapter", "pool"]
ReplicaDirective = Literal["drain", "sleep"]


class RunInfo(Record):
    """A training run, with the mean losses of its last steps if they were asked for."""

    id: str
    state: str
    base_model: str
    project_id: str
    session_id: str
    rank: int
    alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: str
    user_metadata: dict[str, str] | None = None
    sdk_version: str
    created_at: datetime
    last_request_at: datetime
    ended_at: datetime | None = None
    end_reason: str | None = None
    optimizer_steps: int
    weight: float
    metrics: list[str]
    recent_losses: list[float | None]


class RunWeight(Record):
    """Weight of a run's passes among the runs of its tenant."""

    id: str
    weight: float


class RunList(Record):
    """A page of runs, latest first; without a next cursor it is the last one."""

    runs: list[RunInfo]
    next_cursor: str | None = None


class MarkInfo(Record):
    """Something that happened to a run beside its steps, and the last step that had ended by then."""

    id: str
    kind: str
    at: datetime
    step: int
    text: str
    name: str | None = None


class MarkList(Record):
    """Marks in order of time."""

    marks: list[MarkInfo]


class PointInfo(Record):
    """An optimizer step of a run, the first being 1, and the passes since the step before."""

    step: int
    at: datetime
    mean_loss: float | None = None
    loss_sum: float | None = None
    loss_weight: float
    loss_per: str
    loss_fns: list[str] = []
    tokens: int
    learning_rate: float | None = None
    grad_norm: float | None = None
    sampling_kl: float | None = None
    sampled_tokens: int
    adapter_step: int | None = None


class Points(Record):
    """Points in order of their steps; number of the run's steps, and names of its own metrics."""

    points: list[PointInfo]
    optimizer_steps: int
    metrics: list[str]


class ValueInfo(Record):
    """Value of a metric at a step; None for one that was not finite."""

    step: int
    value: float | None = None
    at: datetime


class MetricValues(Record):
    """Values of one metric in order of their steps."""

    name: str
    values: list[ValueInfo]


class Recorded(Record):
    """Number of values that a request brought."""

    values: int


UsageDocument = Literal["focus", "cloudevents"]


class UsageInfo(Record):
    """Usage of a bucket; what was not asked for is None. ``cost`` is a decimal number, None if a part has no price."""

    start: datetime
    project: str | None = None
    session: str | None = None
    run: str | None = None
    key: int | None = None
    base_model: str | None = None
    kind: str | None = None
    operations: int
    failed: int
    train_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    sampled_tokens: int
    cost: str | None = None


class Usage(Record):
    """A page of usage, and where the next one begins; ``currency`` of the costs, None without prices.

    Older services send no ``next_cursor``.
    """

    lines: list[UsageInfo]
    currency: str | None = None
    next_cursor: str | None = None
    next_offset: int | None = None


class AuditInfo(Record):
    """One thing that was done, or refused: by whom, through which door, to what, and what has changed."""

    id: int
    at: datetime
    actor: str
    key_id: int | None = None
    role: str | None = None
    door: str
    action: str
    resource: str
    resource_id: str
    project_id: str | None = None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    address: str | None = None
    trace_id: str | None = None
    outcome: str


class AuditPageBody(Record):
    """Entries of the audit log, newest first; cursor of the next page, None on the last one."""

    entries: list[AuditInfo]
    next_cursor: str | None = None


class KeyBody(Record):
    """A key without its secret."""

    key_id: int
    prefix: str
    note: str
    role: str
    scopes: list[str]
    projects: list[str] | None = None
    base_models: list[str] | None = None
    max_rank: int | None = None
    networks: list[str] | None = None
    limits: dict[str, int] = {}
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


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
    created_at: datetime | None = None
    limits: dict[str, int]


class ProjectList(Record):
    """Projects, the default one first."""

    projects: list[ProjectBody]


class KeptCheckpoint(Record):
    """A checkpoint of ``run``, and how many samplers of open sessions draw from it now."""

    checkpoint_id: str
    checkpoint_type: str
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    run: str
    samplers: int


class KeptCheckpoints(Record):
    """A page of checkpoints, newest first."""

    checkpoints: list[KeptCheckpoint]
    cursor: Cursor
    next_cursor: str | None = None


class DeletedCheckpoints(Record):
    """Number of checkpoints that were deleted, and the paths at which there was none."""

    deleted: int
    missing: list[str]


class JobError(Record):
    """Reason why a job failed or was cancelled."""

    code: str
    message: str


class ReceivedBytes(Record):
    """Bytes of an archive that have come before its upload broke off."""

    received_bytes: int


class JobInfo(Record):
    """A merge or an import. ``path`` is what it made; ``total_bytes`` is 0 until it is known."""

    id: str
    kind: str
    state: str
    base_model: str
    path: str | None = None
    done_bytes: int
    total_bytes: int
    attempts: int
    created_at: datetime
    finished_at: datetime | None = None
    is_cancelling: bool
    error: JobError | None = None


class JobList(Record):
    """Jobs, newest first."""

    jobs: list[JobInfo]
