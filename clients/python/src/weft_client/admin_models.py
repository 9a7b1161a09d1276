"""Records of the admin API's answers. ``clients/python/make_admin_models.py`` makes them of its document.

A field with a fixed set of words is a ``str``: a newer service may have more of them.
"""

from datetime import date, datetime
from decimal import Decimal
from typing import Any, Generic, TypeVar

from weft_client.models import Record

R = TypeVar("R", bound=Record)


class Page(Record, Generic[R]):
    """A page of a list, in order of ids. ``next``: what the next page asks for as ``after``; None: this is the last one."""

    items: list[R]
    next: str | None = None


class AuditDigestBody(Record):
    """Digest of a day's entries."""

    day: date
    entries: int
    digest: str


class AuditVerification(Record):
    """Outcome of a look at every day's digest. - ``expired_to``: last day whose entries are gone by age. - ``last``: the
    newest digest. Keep it elsewhere: it is what shows that the last days were not cut off. - ``problems``: a line for
    each day that is not as it was written.
    """

    days: int
    entries: int
    expired_to: date | None = None
    last: AuditDigestBody | None = None
    problems: list[str]


class BaseBody(Record):
    """A base model's name, and the weights that it stands for."""

    base_model: str
    fingerprint: str
    accepted_at: datetime


class CheckpointBody(Record):
    """A checkpoint of a tenant. ``listed`` false: its tenant's lists leave it out, since a sampler made it for itself."""

    id: str
    tenant_id: str
    run: str
    path: str
    size_bytes: int
    listed: bool
    public: bool
    created_at: datetime
    expires_at: datetime | None = None


class DirectedRunBody(Record):
    """Outcome of a directive. ``trainer`` is the one that has the run, or that gets it now."""

    id: str
    outcome: str
    trainer: str | None = None


class LastPassBody(Record):
    """A trainer's last pass. ``tokens`` leaves padding out, ``padding_share`` is its part of all computed positions, 0 to
    1.
    """

    ended_at: datetime
    seconds: float
    tokens: int
    padding_share: float
    sequences: int
    adapters: int
    tenants: int


class DrainedTrainer(Record):
    """A trainer that gives up its runs. ``others``: trainers of its base model that take runs."""

    id: str
    host: str
    pid: int
    started_at: datetime
    is_alive: bool
    lease_seconds: float
    release: str | None = None
    base_model: str
    drained_at: datetime | None = None
    reason: str | None = None
    runs: int
    residents: int | None = None
    replays: int
    last_pass: LastPassBody | None = None
    others: int


class EndedSession(Record):
    """A session that was ended, and how many operations that has cancelled."""

    id: str
    cancelled: int


class GateBody(Record):
    """A gate. It is open while ``mode`` is None; ``generation`` grows with every change."""

    key: str
    mode: str | None = None
    generation: int
    in_flight: int
    reason: str | None = None
    expires_at: datetime | None = None


class AlertBody(Record):
    """A crossing of ``percent`` of the amount of a tenant's budget, or of that of its key or project. ``key``: the first
    of the keys that share the budget. ``currency`` None: the amount is in tokens.
    """

    tenant_id: str
    tenant: str
    key: int | None = None
    project: str | None = None
    period: str
    percent: int
    amount: Decimal
    currency: str | None = None
    at: datetime


class ApiBody(Record):
    """A process that answers clients, for every base model."""

    id: str
    host: str
    pid: int
    started_at: datetime
    is_alive: bool
    lease_seconds: float
    release: str | None = None


class AuditEntryBody(Record):
    """An entry. ``tenant_id`` None: about the service itself."""

    id: int
    at: datetime
    tenant_id: str | None = None
    actor: str
    key_id: int | None = None
    role: str | None = None
    door: str
    action: str
    resource: str
    resource_id: str
    project: str | None = None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    address: str | None = None
    trace_id: str | None = None
    outcome: str


class TakeOverBody(Record):
    """Runs of a dead trainer that ``trainer`` has now; None: those that no trainer has."""

    trainer: str | None = None
    runs: int


class EndedBody(Record):
    """A process that died: its lease ended, or it was seen to exit. ``kind``: ``trainer``, ``pool`` or ``api``. ``runs``
    and ``samples``: what it had in hand, which others took over. ``taken_over``: which trainers have those runs now.
    """

    id: str
    kind: str
    base_model: str
    host: str
    pid: int
    release: str | None = None
    started_at: datetime
    ended_at: datetime
    runs: int
    samples: int
    taken_over: list[TakeOverBody]


class AheadInfo(Record):
    """Work before the operation: the tenant's own, its own tokens with it, and all others' as sums. -
    ``other_operations``, ``other_tokens``: rounded up to powers of two, and up to a second old. - ``bound_passes``:
    passes within which its sequences are in one. ``bound_tokens``: most tokens of others before it, less what they give
    back. Both hold for the tenants that have work now. - ``eta_seconds``: estimate from ``tokens_per_second``, the
    speed while this waits; None while it is not known.
    """

    own_operations: int
    own_tokens: int
    other_operations: int
    other_tokens: int
    bound_passes: int | None = None
    bound_tokens: int | None = None
    eta_seconds: float | None = None
    tokens_per_second: float | None = None


class WaitingInfo(Record):
    """Wait of a run's next operation, or of a request. ``reason`` None: nothing waits. - ``request_id``: None for a run of
    which nothing is pending, whose client is refused new passes: its ``budget`` is spent. - ``cause``: reason of the
    operation of the run that comes first, if that is another; else ``reason``. - ``since``, ``until``: when the reason
    began, and when it ends at the latest if that is known. - ``seq_id``: number that is missing, or that comes first. -
    ``ahead``: None where no turn is waited for.
    """

    request_id: str | None = None
    reason: str | None = None
    cause: str | None = None
    text: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    seq_id: int | None = None
    ahead: AheadInfo | None = None


class OperationBody(Record):
    """An operation. ``tenant`` is a name; ``wait`` is None once the operation is final, and in a list without what is
    ahead.
    """

    id: str
    tenant: str
    lane: str
    seq_id: int
    kind: str
    base_model: str
    state: str
    created_at: datetime
    age_seconds: float
    finished_at: datetime | None = None
    tokens: int
    attempts: int
    trace_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    wait: WaitingInfo | None = None


class OperatorsKeyBody(Record):
    """A tenant's key without its secret, with its tenant's id. ``payer`` is the number of the key whose budgets and rates
    it spends of: its own, or that of the first that shares them.
    """

    key_id: int
    prefix: str
    note: str
    role: str
    scopes: list[str]
    projects: list[str] | None = None
    base_models: list[str] | None = None
    max_rank: int | None = None
    networks: list[str] | None = None
    limits: dict[str, int]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    tenant_id: str
    payer: int | None = None


class PlacementBody(Record):
    """A run with work that waits for a trainer."""

    run_id: str
    tenant_id: str
    base_model: str
    created_at: datetime
    announced_at: datetime | None = None


class PoolBody(Record):
    """A sampling process: the samples that it has claimed, and of them those that replicas draw now."""

    id: str
    host: str
    pid: int
    started_at: datetime
    is_alive: bool
    lease_seconds: float
    release: str | None = None
    base_model: str
    state: str
    claimed: int
    in_flight: int


class PriceBody(Record):
    """A price. ``base_model`` None: of every base that has none of its own."""

    meter: str
    base_model: str | None = None
    amount: Decimal
    currency: str
    valid_from: datetime


class ProjectBody(Record):
    """A project. ``id`` or ``name`` is what clients send as ``project_id``; ``created_at`` is None for the default one."""

    id: str
    name: str
    created_at: datetime | None = None
    limits: dict[str, int]


class Filler(Record):
    """A tenant's part of a line of the queue."""

    tenant: str
    pending: int
    tokens: int


class QueueLine(Record):
    """Pending operations of one base model and kind. ``tokens``: of training data, or what samples may take at most."""

    base_model: str
    kind: str
    pending: int
    tokens: int
    oldest_seconds: float
    tenants: int
    filled_by: list[Filler]


class ReplicaBody(Record):
    """A replica, and the directive that an operator has given it; None: to work. - ``condition``: as its sampling process,
    ``process``, tells it; None for one that no process has told of. - ``is_alive``: false once that process is dead.
    ``adapters``: versions that were asked for on it since it started.
    """

    base_model: str
    replica: str
    directive: str | None = None
    reason: str | None = None
    since: datetime | None = None
    in_flight: int
    process: str | None = None
    is_alive: bool
    condition: str | None = None
    adapters: int | None = None


class RunBody(Record):
    """A training run. ``trainer_id`` is the process that leases it, None while nobody does. ``is_resident``: its adapter
    is in that process's memory, as that told some seconds ago at most.
    """

    id: str
    tenant_id: str
    base_model: str
    rank: int
    state: str
    trainer_id: str | None = None
    lease_token: int
    next_seq_id: int
    snapshot_seq_id: int
    optimizer_steps: int
    weight: float
    is_resident: bool
    created_at: datetime
    last_request_at: datetime


class SessionBody(Record):
    """A client's session. ``ended_at`` is None while it is open."""

    id: str
    tenant_id: str
    project: str | None = None
    key_id: int | None = None
    sdk_version: str
    created_at: datetime
    last_seen_at: datetime
    ended_at: datetime | None = None
    end_reason: str | None = None
    end_detail: str | None = None


class StepBody(Record):
    """A step's last run. ``error``: failure of the run that was asked for."""

    step: str
    has_run: bool
    succeeded_at: datetime | None = None
    rows: int
    seconds: float
    behind_since: datetime | None = None
    failing_since: datetime | None = None
    error: str | None = None


class SuspensionBody(Record):
    """A suspension. ``reason`` is what the tenant's clients read."""

    mode: str
    since: datetime
    reason: str | None = None


class TenantBody(Record):
    """A tenant. ``limits`` has only the values of its own; ``suspension`` is None while it works. What it has is removed
    from ``delete_at`` on; ``deleted_at`` is when nothing was left.
    """

    id: str
    name: str
    created_at: datetime
    share: float
    service_class: str
    limits: dict[str, int]
    suspension: SuspensionBody | None = None
    delete_at: datetime | None = None
    deleted_at: datetime | None = None


class ServedWindow(Record):
    """A tenant's part of what was served in the last ``seconds``, and the part that it was entitled to. ``tokens``: of its
    operations that have ended in that time, and are not pruned yet.
    """

    seconds: int
    tokens: int
    served_share: float
    entitled_share: float


class TenantShares(Record):
    """A tenant with its load. ``tokens_today``: of what has ended today (UTC)."""

    id: str
    name: str
    created_at: datetime
    share: float
    service_class: str
    limits: dict[str, int]
    suspension: SuspensionBody | None = None
    delete_at: datetime | None = None
    deleted_at: datetime | None = None
    pending: int
    pending_tokens: int
    oldest_seconds: float
    served: list[ServedWindow]
    stored_bytes: int
    checkpoints: int
    tokens_today: int


class TenantUsageBody(Record):
    """A line of a tenant's usage. ``currency`` is that of the cost, None without prices."""

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
    currency: str | None = None


class TrainerBody(Record):
    """A trainer, and the runs that it leases. ``drained_at`` is None while it takes runs. ``residents``: runs whose
    adapters are in its memory, None until it has told. ``replays``: adapters that it rebuilt in the last hour by
    computing operations again. ``last_pass``: told every few seconds while it trains, None before.
    """

    id: str
    host: str
    pid: int
    started_at: datetime
    is_alive: bool
    lease_seconds: float
    release: str | None = None
    base_model: str
    drained_at: datetime | None = None
    reason: str | None = None
    runs: int
    residents: int | None = None
    replays: int
    last_pass: LastPassBody | None = None


class UsageDayBody(Record):
    """A tenant's usage on one day (UTC): operations done, and their tokens."""

    tenant: str
    day: date
    base_model: str
    kind: str
    operations: int
    tokens: int


class WebhookBody(Record):
    """A webhook. - ``disabled_at``, ``disabled_reason``: since when nothing is sent, and why if weft has switched it off
    itself. - ``succeeded_at``: last time at which the receiver took an event. - ``missed``: events that were not
    recorded, since too many waited. - ``last_error``: why the newest delivery failed; None if it did not.
    """

    name: str
    url: str
    events: list[str]
    note: str
    is_enabled: bool
    disabled_at: datetime | None = None
    disabled_reason: str | None = None
    created_at: datetime
    succeeded_at: datetime | None = None
    missed: int
    last_error: str | None = None


class WebhookEventBody(Record):
    """An event of a webhook. ``due_at``: when it is sent next; None: it was taken, or given up."""

    number: int
    id: str
    type: str
    created_at: datetime
    due_at: datetime | None = None
    attempts: int
    delivered_at: datetime | None = None
    last_status: int | None = None
    last_error: str | None = None
    body: dict[str, Any]


class MadeKey(Record):
    """A key that was made. ``secret`` is the whole key, shown only here and in a repeat with the same Idempotency-Key."""

    key_id: int
    prefix: str
    secret: str


class MadeTenant(Record):
    """A tenant that was made, with its first key: an administrator's, shown only here and in a repeat of the request."""

    tenant: TenantBody
    key: MadeKey


class MarkedTenant(Record):
    """A tenant that is to be deleted, and the checkpoints that go with it: export before ``delete_at`` what is to stay."""

    id: str
    name: str
    created_at: datetime
    share: float
    service_class: str
    limits: dict[str, int]
    suspension: SuspensionBody | None = None
    delete_at: datetime | None = None
    deleted_at: datetime | None = None
    checkpoints: int
    stored_bytes: int


class TenantLoad(Record):
    """A tenant that has work, or had some in the window. - ``served_share``: its part of all tokens served in the window.
    - ``entitled_share``: its part by weight, of the tenants in the list that are not suspended.
    """

    id: str
    name: str
    share: float
    suspension: str | None = None
    pending: int
    pending_tokens: int
    oldest_seconds: float
    served_tokens: int
    tokens_per_second: float
    served_share: float
    entitled_share: float


class Overview(Record):
    """The service now, by the database's clock. ``tenants``: the busiest first."""

    at: datetime
    window_seconds: int
    tenants: list[TenantLoad]
    queue: list[QueueLine]
    trainers: list[TrainerBody]
    pools: list[PoolBody]
    apis: list[ApiBody]
    replicas: list[ReplicaBody]


class DirectiveBody(Record):
    """Wish of an operator that the run's trainer has not carried out yet."""

    directive: str
    target: str | None = None
    reason: str | None = None


class RunEventBody(Record):
    """One event of a run's history."""

    at: datetime
    kind: str
    trainer: str | None = None
    lease_token: int
    detail: str | None = None


class RunDetails(Record):
    """A run with its tenant's name, its pending operations, its directive and its history, the newest first. ``waiting``:
    why its next operation has not ended, or why its client is refused new passes; None when nothing waits.
    """

    id: str
    tenant_id: str
    base_model: str
    rank: int
    state: str
    trainer_id: str | None = None
    lease_token: int
    next_seq_id: int
    snapshot_seq_id: int
    optimizer_steps: int
    weight: float
    is_resident: bool
    created_at: datetime
    last_request_at: datetime
    tenant: str
    pending: int
    waiting: WaitingInfo | None = None
    directive: DirectiveBody | None = None
    events: list[RunEventBody]


class SessionDetails(Record):
    """A session with the ids of its runs and samplers."""

    id: str
    tenant_id: str
    project: str | None = None
    key_id: int | None = None
    sdk_version: str
    created_at: datetime
    last_seen_at: datetime
    ended_at: datetime | None = None
    end_reason: str | None = None
    end_detail: str | None = None
    runs: list[str]
    samplers: list[str]


class LimitReport(Record):
    """A limit. ``used`` is None for a limit of single requests."""

    name: str
    value: int
    used: int | None = None
    is_reached: bool
    is_own: bool
    reason: str


class RateReport(Record):
    """A rate. ``waiting`` tokens are charged and not worked off yet; ``remaining`` may run now; all are back in
    ``seconds``. ``key``: the first of the keys that share it; ``project``: id of the project that has it. Without both
    it is the tenant's.
    """

    meter: str
    per_minute: int
    burst: int
    waiting: int
    remaining: int
    seconds: float
    key: int | None = None
    project: str | None = None


class RequestRateReport(Record):
    """A rate of requests: ``used`` of the last minute; one more is answered in ``seconds``, 0 for now. ``key``: the first
    of the keys that share it; ``project``: id of the project that has it. Without both it is the tenant's.
    """

    per_minute: int
    used: int
    remaining: int
    seconds: int
    key: int | None = None
    project: str | None = None


class BudgetReport(Record):
    """A budget in tokens, of the key with that number, of the project, or else of the whole tenant. ``resets_at`` is None
    for a total one.
    """

    key: int | None = None
    project: str | None = None
    project_name: str | None = None
    period: str
    amount: int
    spent: int
    is_spent: bool
    resets_at: datetime | None = None


class MoneyBudgetReport(Record):
    """A budget in money, as decimal text. Tokens without a price, ``unpriced_tokens``, count nothing in ``spent``."""

    key: int | None = None
    project: str | None = None
    project_name: str | None = None
    period: str
    currency: str
    amount: Decimal
    spent: Decimal
    unpriced_tokens: int
    is_spent: bool
    resets_at: datetime | None = None


class AlertReport(Record):
    """A crossing of ``percent`` of the amount of a budget in tokens."""

    key: int | None = None
    project: str | None = None
    period: str
    percent: int
    amount: int
    at: datetime


class MoneyAlertReport(Record):
    """A crossing of ``percent`` of the amount of a budget in money."""

    key: int | None = None
    project: str | None = None
    period: str
    currency: str
    percent: int
    amount: Decimal
    at: datetime


class ProjectLimitReport(Record):
    """A project's own limit. ``used`` is None for a limit of single requests, and for rates."""

    name: str
    value: int
    used: int | None = None
    is_reached: bool


class ProjectReport(Record):
    """A project with limits of its own, which hold beside the tenant's."""

    id: str
    name: str
    limits: list[ProjectLimitReport]


class StandingReport(Record):
    """A tenant's share, the class whose factor is on it, its limits, rates, budgets, latest alerts, and projects with
    limits. ``request_rates`` is empty where requests are not counted: for a command straight on the database.
    """

    share: float
    service_class: str
    limits: list[LimitReport]
    rates: list[RateReport]
    request_rates: list[RequestRateReport]
    budgets: list[BudgetReport]
    money_budgets: list[MoneyBudgetReport]
    alerts: list[AlertReport]
    money_alerts: list[MoneyAlertReport]
    projects: list[ProjectReport]


class TouchedOperation(Record):
    """An operation that was ended, with its ``error_code``, or that is to begin anew."""

    id: str
    error_code: str | None = None


class UsageMismatch(Record):
    """A sum of a tenant that differs. ``table`` holds ``told``; ``counted`` is what the finer rows come to."""

    tenant: str
    table: str
    name: str
    told: int
    counted: int


class UsageVerification(Record):
    """Usage of one day (UTC), counted again; hours from ``since`` on from their operations, which were all kept.
    ``has_all_hours``: no hour of the day has expired, so that the day was counted again from its hours.
    """

    day: date
    since: datetime
    tenants: int
    operations: int
    has_all_hours: bool
    mismatches: list[UsageMismatch]


class WebhookSecretBody(Record):
    """Secret that signs what is sent to a webhook."""

    name: str
    secret: str
