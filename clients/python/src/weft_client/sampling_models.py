"""Records of gates, samples and pending operations, and the base of all records. ``weft_client.models`` has them too."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of the records."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class GateState(Record):
    """State of an adapter's gate: ``open``, ``pausing`` or ``paused``; versions and samples in flight on each replica."""

    adapter: str
    base_model: str
    state: str
    generation: int
    mode: str | None = None
    reason: str | None = None
    since: datetime | None = None
    expires_at: datetime | None = None
    in_flight: int
    versions: dict[str, list[str]]
    replicas: dict[str, int]


class Cursor(Record):
    """Place of a page in its list."""

    offset: int
    limit: int
    total_count: int


class AdapterList(Record):
    """Gates of a page of adapters, those of the newest runs first."""

    adapters: list[GateState]
    cursor: Cursor
    next_cursor: str | None = None


class Reloaded(Record):
    """Version that live samplers follow now."""

    adapter: str
    version: str


class StalenessInfo(Record):
    """Bound and swap policy of a live sampler, and the number of versions that it has followed."""

    sampler_id: str
    max_version_lag: int | None = None
    on_stale: str | None = None
    swap_policy: str | None = None
    publications: int


class Span(Record):
    """Tokens ``[start, end)`` of a sequence, all made by ``version``; None is the bare base."""

    version: str | None = None
    start: int
    end: int


class Sequence(Record):
    """A sampled sequence, and the weights that made its tokens."""

    stop_reason: str
    spans: list[Span]


class AheadInfo(Record):
    """Work before a pending operation, the bound on its wait and an estimate, as far as they are known."""

    own_operations: int
    own_tokens: int
    other_operations: int
    other_tokens: int
    bound_passes: int | None = None
    bound_tokens: int | None = None
    eta_seconds: float | None = None
    tokens_per_second: float | None = None


class WaitingInfo(Record):
    """Wait of a run's next operation, or of a request; without a reason nothing waits."""

    request_id: str | None = None
    reason: str | None = None
    cause: str | None = None
    text: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    seq_id: int | None = None
    ahead: AheadInfo | None = None


class UsedVersion(Record):
    """A version of ``run``: its path, None without a name, and the optimizer step that it was saved after."""

    version: str
    run: str
    path: str | None = None
    step: int
    created_at: datetime


class SampleInfo(Record):
    """Report on a finished sample."""

    request_id: str
    sequences: list[Sequence]
    min_version: str | None = None
    max_version: str | None = None
    replicas: list[str]
    attempts: int
    queue_seconds: float
    decode_seconds: float
    scored_version: str | None = None
    versions: list[UsedVersion]


class SampleSummary(Record):
    """A finished sample in a list; what only a report tells is None or empty for one that failed."""

    request_id: str
    sampler_id: str
    run: str | None = None
    path: str | None = None
    base_model: str
    state: str
    created_at: datetime
    finished_at: datetime
    prompt_tokens: int
    sampled_tokens: int
    error_code: str | None = None
    error: str | None = None
    stop_reasons: list[str]
    versions: list[str | None]
    attempts: int | None = None
    queue_seconds: float | None = None
    decode_seconds: float | None = None


class SampleList(Record):
    """Finished samples, newest first; ``next`` is None on the last page."""

    samples: list[SampleSummary]
    next: str | None = None


class OwnOperation(Record):
    """An operation of the tenant; ``wait`` is None once it has ended."""

    request_id: str
    lane: str
    seq_id: int
    kind: str
    base_model: str
    state: str
    created_at: datetime
    finished_at: datetime | None = None
    tokens: int
    trace_id: str | None = None
    error_code: str | None = None
    error: str | None = None
    wait: WaitingInfo | None = None


class OperationList(Record):
    """Operations: pending ones oldest first, others newest first; ``next`` is None on the last page."""

    operations: list[OwnOperation]
    next: str | None = None


class ClientExceptionInfo(Record):
    """An exception that ended a client's script; ``at`` is when the service was told."""

    id: int
    session_id: str
    at: datetime
    error_type: str
    message: str
    traceback: str


class ClientExceptionList(Record):
    """Exceptions, newest first; ``next`` is None on the last page."""

    exceptions: list[ClientExceptionInfo]
    next: int | None = None
