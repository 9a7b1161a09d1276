"""Standing of a tenant: each of its limits, how much of it is used, and what happens beyond it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from math import ceil
from operator import itemgetter
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.rate_lines import RateLine, RateScope
from contracts.service_class import ServiceClass, known_class
from store.tables import Tenant
from tenants.budget_settings import Alert, BudgetStanding, alerts_of, budgets_of
from tenants.keys import limits_of_keys, live_keys
from tenants.limit_use import ALL_USE
from tenants.limits import LIMIT_NAMES, Limits
from tenants.project_limits import ProjectUse
from tenants.project_uses import uses_of_tenant
from tenants.rate_lines import line_states_of_tenant
from tenants.rates import Meter, RateState, rate_states
from tenants.reach import Owner, Reach
from tenants.request_rates import REQUEST_RATE, RequestCount, RequestRates, RequestScope, request_rate

_REASONS: Final = {
    "pending_operations": "a training request beyond it waits, then is answered 429 and sent again by the SDK",
    "pending_bytes": "a training request beyond it waits, then is answered 429 and sent again by the SDK",
    "seq_ahead": "a training request whose seq_id is farther ahead of its model fails",
    "open_runs": "a model beyond it is created when another is unloaded or its session ends",
    "max_rank": "a model or a copy of a larger rank is refused with 403, an import fails; 0: the service's bound alone",
    "sessions": "create_session beyond it is answered 429 until another session has ended",
    "stored_bytes": "a save beyond it fails; training goes on, and new models wait once the snapshots alone take it. "
    "Delete checkpoints or set a TTL",
    "checkpoints": "a save beyond it fails; training goes on. Delete checkpoints or set a TTL",
    "metadata_bytes": "user_metadata or tags that are larger are refused",
    "pending_samples": "a sample beyond it is answered 429 and sent again by the SDK",
    "sample_tokens": "a sample beyond it is answered 429 and sent again by the SDK",
    "session_samplers": "a sampler beyond it in one session is refused; another session takes it",
    "sample_record_bytes": "the oldest records of samples are forgotten; training that names one fails and says so",
    "checkpoint_seconds": "a checkpoint that is saved to be kept longer, or for ever, expires then",
    "kept_checkpoints": "the oldest of a model's checkpoints of one kind expires when another is saved",
    "run_metrics": "values of own metrics beyond it in one model are refused",
    "tenant_metrics": "values of own metrics beyond it in all models are refused",
    "webhooks": "a webhook beyond it is refused",
    "keys": "a key beyond it is refused. Revoke one that is not used",
    "train_tokens_per_minute": "training beyond it is accepted and waits; 0: no rate",
    "train_tokens_burst": "training tokens that may run at once under the rate; 0: those of a minute",
    "sample_tokens_per_minute": "samples beyond it are accepted and wait; on OpenAI's routes 429. 0: no rate",
    "sample_tokens_burst": "tokens of samples that may run at once under the rate; 0: those of a minute",
    "requests_per_minute": "a request beyond it is answered 429, but for what the SDK counts on; 0: no rate",
    "sample_work": "a sample with a larger num_samples x max_tokens x topk is refused",
}


@dataclass(frozen=True, slots=True)
class LimitStanding:
    """One limit. ``used`` is None for a limit of single requests. ``is_own``: the tenant has a value of its own."""

    name: str
    value: int
    used: int | None
    is_own: bool
    reason: str

    @property
    def is_reached(self) -> bool:
        """True when there is no room left."""
        return self.used is not None and self.used >= self.value


@dataclass(frozen=True, slots=True)
class RateStanding:
    """A rate: ``waiting`` tokens are charged and not worked off, ``remaining`` may run now, all are back in ``seconds``.

    ``key``: the first of the keys that share it; ``project``: id of the project that has it. Without both it is the tenant's.
    """

    meter: Meter
    per_minute: int
    burst: int
    waiting: int
    remaining: int
    seconds: float
    key: int | None = None
    project: str | None = None


@dataclass(frozen=True, slots=True)
class RequestRateStanding:
    """A rate of requests: ``used`` of the last minute, as counted here; one more is answered in ``seconds``, 0 for now.

    ``key``: the first of the keys that share it; ``project``: id of the project that has it. Without both it is the tenant's.
    """

    per_minute: int
    used: int
    remaining: int
    seconds: int
    key: int | None = None
    project: str | None = None


@dataclass(frozen=True, slots=True)
class ProjectLimitStanding:
    """A project's own limit. ``used`` is None for a limit of single requests, and for rates."""

    name: str
    value: int
    used: int | None

    @property
    def is_reached(self) -> bool:
        """True when there is no room left."""
        return self.used is not None and self.used >= self.value


@dataclass(frozen=True, slots=True)
class ProjectStanding:
    """A project with limits of its own, which hold beside its tenant's."""

    id: str
    name: str
    limits: list[ProjectLimitStanding]


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant's share, its class, its limits, rates and budgets, its latest alerts, and its projects with limits."""

    share: float
    service_class: ServiceClass
    limits: list[LimitStanding]
    rates: list[RateStanding]
    request_rates: list[RequestRateStanding]
    budgets: list[BudgetStanding]
    alerts: list[Alert]
    projects: list[ProjectStanding]


def rate_standing(meter: Meter, state: RateState, now: datetime) -> RateStanding:
    """Return where a rate stands."""
    debt = max(0.0, state.debt(now))
    return RateStanding(
        meter=meter,
        per_minute=round(state.pace.per_second * 60),
        burst=state.pace.burst,
        waiting=ceil(debt),
        remaining=max(0, int(state.pace.burst - debt)),
        seconds=debt / state.pace.per_second,
    )


async def standing(
    session: AsyncSession,
    tenant: TenantId,
    defaults: Limits,
    now: datetime,
    owner: Owner | None = None,
    requests: RequestRates | None = None,
) -> Standing:
    """Return where ``tenant`` stands, counted as the limits are enforced; with ``owner`` only the projects that it reaches.

    ``requests`` counts this process's; None where requests are not counted.
    """
    use = await ALL_USE.of(session, tenant, defaults)
    row = (
        await session.execute(select(Tenant.share, Tenant.service_class, Tenant.limits).where(Tenant.id == tenant))
    ).one()
    used = {**use.used, "keys": await live_keys(session, tenant, now)}
    charged = await rate_states(session, [tenant])
    paces = {meter: pace for meter in Meter if (pace := use.limits.pace(meter)) is not None}
    states = {meter: charged.get((tenant, meter)) or RateState.fresh(pace, now) for meter, pace in paces.items()}
    lines = await line_states_of_tenant(session, tenant)
    projects = await uses_of_tenant(session, owner or tenant)
    request_rates = await _request_rates(session, tenant, use.limits, projects, now, requests)
    for one in request_rates:
        if one.key is None and one.project is None:
            used[REQUEST_RATE] = one.used
    return Standing(
        share=row.share,
        service_class=known_class(row.service_class),
        limits=_limit_standings(use.limits, used, own=row.limits or {}),
        rates=[
            *(rate_standing(meter, state, now) for meter, state in states.items()),
            *(
                _of_line(line, state, now)
                for line, state in sorted(lines.items(), key=itemgetter(0))
                if _reaches(owner, line)
            ),
        ],
        request_rates=request_rates,
        budgets=await budgets_of(session, owner or tenant, now),
        alerts=await alerts_of(session, owner or tenant),
        projects=[_of_project(use) for use in projects],
    )


def _limit_standings(limits: Limits, used: Mapping[str, int], *, own: Mapping[str, int]) -> list[LimitStanding]:
    values = limits.by_name()
    return [
        LimitStanding(
            name=name,
            value=values[name],
            used=used.get(name),
            is_own=name in own,
            reason=_REASONS[name],
        )
        for name in LIMIT_NAMES
    ]


def _reaches(owner: Owner | None, line: RateLine) -> bool:
    return line.scope is RateScope.KEY or not isinstance(owner, Reach) or line.scope_id in owner.projects


def _of_line(line: RateLine, state: RateState, now: datetime) -> RateStanding:
    stands = rate_standing(Meter(line.meter), state, now)
    if line.scope is RateScope.KEY:
        return replace(stands, key=int(line.scope_id))
    return replace(stands, project=line.scope_id)


async def _request_rates(
    session: AsyncSession,
    tenant: TenantId,
    own: Limits,
    projects: list[ProjectUse],
    now: datetime,
    requests: RequestRates | None,
) -> list[RequestRateStanding]:
    if requests is None:
        return []
    rates = request_rate(tenant, RequestScope.TENANT, tenant, own.by_name())
    for payer, limits in sorted((await limits_of_keys(session, tenant, now)).items()):
        rates += request_rate(tenant, RequestScope.KEY, payer, limits)
    for project in projects:
        rates += request_rate(tenant, RequestScope.PROJECT, project.id, project.limits)
    return [_of_count(await requests.of(rate)) for rate in rates]


def _of_count(count: RequestCount) -> RequestRateStanding:
    rate = count.rate
    return RequestRateStanding(
        per_minute=rate.per_minute,
        used=count.used,
        remaining=count.remaining,
        seconds=count.seconds,
        key=int(rate.id) if rate.scope is RequestScope.KEY else None,
        project=rate.id if rate.scope is RequestScope.PROJECT else None,
    )


def _of_project(use: ProjectUse) -> ProjectStanding:
    limits = [ProjectLimitStanding(name, value, use.used.get(name)) for name, value in sorted(use.limits.items())]
    return ProjectStanding(use.id, use.name, limits)
