"""Limits of a tenant: one place for their names, their values and the locks under which use is counted.

A tenant's limit is its own value (``tenants.limits``) or else the setting ``WEFT_LIMIT_<NAME>``. Own values are read in the
request or transaction that they bound and are never cached, so a change holds from the next request of every process on.
``tenants.limit_use`` counts the use.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Self

from sqlalchemy import bindparam, func, literal_column, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound
from contracts.ids import TenantId
from contracts.service_class import ServiceClass
from store.clock import Clock, utc_now
from store.limit_settings import LimitSettings
from store.tables import Tenant
from tenants.rates import RATE_LIMITS, Meter, Pace, pace_of, set_pace

MOST = 2**53
"""Largest value of a limit: every JSON reader holds it exactly."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one tenant. The settings ``WEFT_LIMIT_…`` describe each."""

    pending_operations: int
    pending_bytes: int
    seq_ahead: int
    open_runs: int
    max_rank: int
    sessions: int
    stored_bytes: int
    checkpoints: int
    metadata_bytes: int
    pending_samples: int
    sample_tokens: int
    sample_work: int
    session_samplers: int
    sample_record_bytes: int
    run_metrics: int
    tenant_metrics: int
    webhooks: int
    keys: int
    checkpoint_seconds: int
    kept_checkpoints: int
    train_tokens_per_minute: int
    train_tokens_burst: int
    sample_tokens_per_minute: int
    sample_tokens_burst: int
    requests_per_minute: int

    @classmethod
    def of(cls, settings: LimitSettings) -> Self:
        """Return the limits of a tenant without values of its own."""
        return cls(**{name: getattr(settings, f"limit_{name}") for name in LIMIT_NAMES})

    def with_own(self, own: Mapping[str, int] | None) -> "Limits":
        """Return these limits with a tenant's own values. A name that this weft does not know is left out."""
        return replace(self, **{name: own[name] for name in LIMIT_NAMES if name in own}) if own else self

    def pace(self, meter: Meter) -> Pace | None:
        """Return the rate of the meter, None for no rate."""
        return pace_of({name: getattr(self, name) for name in RATE_LIMITS}, meter)

    def by_name(self) -> dict[str, int]:
        """Return every limit by its name."""
        return {name: getattr(self, name) for name in LIMIT_NAMES}


LIMIT_NAMES = tuple(field.name for field in fields(Limits))


@dataclass(frozen=True, slots=True)
class TenantChange:
    """Own limits, share and class of a tenant, before and after they were set."""

    tenant: TenantId
    before: Mapping[str, object]
    after: Mapping[str, object]


_OWN = select(Tenant.limits).where(Tenant.id == bindparam("tenant"))


async def limits_of(session: AsyncSession, tenant: TenantId, defaults: Limits) -> Limits:
    """Return the limits of ``tenant``."""
    return defaults.with_own(await session.scalar(_OWN, {"tenant": tenant}))


async def set_tenant(
    transaction: AsyncSession,
    *,
    name: str,
    limits: Mapping[str, int | None],
    share: float | None = None,
    service_class: ServiceClass | None = None,
    defaults: Limits | None = None,
    clock: Clock = utc_now,
) -> TenantChange:
    """Give the tenant of that name own limits, a share and a class. A limit of None goes back to the default.

    A changed rate holds for what waits already, too; ``defaults`` are the limits of a tenant without own values.
    Raises ``NotFound``, and ``InvalidRequest`` for an unknown limit or a value out of range.
    """
    _check_change(limits, share)
    row = (
        await transaction.execute(
            select(Tenant.id, Tenant.limits, Tenant.share, Tenant.service_class)
            .where(Tenant.name == name)
            # As weak as the change allows: work of the tenant that refers to the row goes on beside it.
            .with_for_update(key_share=True)
        )
    ).one_or_none()
    if row is None:
        raise NotFound(f"no tenant is named {name[:100]!r}; `weft tenant list` shows them")
    own = {limit: value for limit, value in {**(row.limits or {}), **limits}.items() if value is not None}
    given = {"share": share, "service_class": service_class}
    values: dict[str, object] = {"limits": own or None} | {
        key: value for key, value in given.items() if value is not None
    }
    await transaction.execute(update(Tenant).where(Tenant.id == row.id).values(values))
    for meter in Meter:
        if any(limit.startswith(f"{meter}_tokens_") for limit in limits):
            effective = (defaults or Limits.of(LimitSettings.model_construct())).with_own(own)
            await set_pace(transaction, TenantId(row.id), meter, effective.pace(meter), clock())
    return TenantChange(
        TenantId(row.id),
        {"limits": row.limits or {}, "share": row.share, "service_class": row.service_class},
        {"limits": own, "share": share or row.share, "service_class": service_class or row.service_class},
    )


def _check_change(limits: Mapping[str, int | None], share: float | None) -> None:
    """Raise ``InvalidRequest`` for an unknown limit or a value out of range."""
    for limit, value in limits.items():
        if limit not in LIMIT_NAMES:
            raise InvalidRequest(f"no limit is named {limit[:50]!r}; the limits are {', '.join(LIMIT_NAMES)}")
        if value is not None and not 1 <= value <= MOST:
            raise InvalidRequest(f"{limit} must be 1 to {MOST}, or `default`; got {value}")
    if share is not None and not 0.001 <= share <= 1000:
        raise InvalidRequest(f"share must be 0.001 to 1000; got {share}")


class Counted(IntEnum):
    """Kind of use that is counted under a lock of its own. The numbers are PostgreSQL's first key of the lock."""

    TRAINING = 5_201
    SAMPLES = 5_202
    SESSIONS = 5_203
    RUNS = 5_204
    STORAGE = 5_205
    SAMPLERS = 5_206
    RECORDS = 5_208
    OPERATORS = 5_209
    """The operators' lock: repeats of a request that makes a tenant come one after the other."""
    CLIENT_EXCEPTIONS = 5_210
    WEBHOOKS = 5_211
    KEYS = 5_212
    PRICES = 5_213
    """The lock of all prices, not a tenant's: they have one currency, and a bounded number."""
    TOLD_ENDS = 5_207
    """A lane's lock, not a tenant's (``ledger.told_ends``)."""


# Sorted, so that two transactions that lock several tenants cannot deadlock.
_LOCK = text(
    "SELECT pg_advisory_xact_lock(:space, number) FROM "
    "(SELECT DISTINCT hashtext(name) AS number FROM unnest(CAST(:tenants AS text[])) AS name ORDER BY 1) AS sorted"
)


def shared_count(counted: Counted, tenant: Any) -> Any:
    """Return the expression, of PostgreSQL, that lets nobody ``hold_count`` this use until the transaction ends.

    Others may share it. ``tenant`` is an expression for the tenant's id.
    """
    return func.pg_advisory_xact_lock_shared(literal_column(str(int(counted))), func.hashtext(tenant))


async def hold_count(transaction: AsyncSession, counted: Counted, tenants: Collection[TenantId]) -> None:
    """Let no other transaction add to this use of ``tenants`` until the transaction ends.

    A query that comes after this sees all that others have added. The lock is on no row: nothing but another addition of the
    same kind, by the same tenant, waits for it.
    """
    # SQLite has one writer anyway.
    if transaction.get_bind().dialect.name != "sqlite":
        await transaction.execute(_LOCK, {"space": int(counted), "tenants": list(tenants)})
