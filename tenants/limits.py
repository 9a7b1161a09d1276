"""Limits of a tenant: one place for their names, their values and the locks under which use is counted.

A tenant's limit is its own value (``tenants.limits``) or else the setting ``WEFT_LIMIT_<NAME>``. Own values are read in the
request or transaction that they bound and are never cached, so a change holds from the next request of every process on.
``tenants.limit_use`` counts the use.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from typing import Self

from sqlalchemy import bindparam, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound
from contracts.ids import TenantId
from store.limit_settings import LimitSettings
from store.tables import Tenant

MOST = 2**53
"""Largest value of a limit: every JSON reader holds it exactly."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one tenant. The settings ``WEFT_LIMIT_…`` describe each."""

    pending_operations: int
    pending_bytes: int
    seq_ahead: int
    open_runs: int
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

    @classmethod
    def of(cls, settings: LimitSettings) -> Self:
        """Return the limits of a tenant without values of its own."""
        return cls(**{name: getattr(settings, f"limit_{name}") for name in LIMIT_NAMES})

    def with_own(self, own: Mapping[str, int] | None) -> "Limits":
        """Return these limits with a tenant's own values. A name that this weft does not know is left out."""
        return replace(self, **{name: own[name] for name in LIMIT_NAMES if name in own}) if own else self

    def by_name(self) -> dict[str, int]:
        """Return every limit by its name."""
        return asdict(self)


LIMIT_NAMES = tuple(field.name for field in fields(Limits))

_OWN = select(Tenant.limits).where(Tenant.id == bindparam("tenant"))


async def limits_of(session: AsyncSession, tenant: TenantId, defaults: Limits) -> Limits:
    """Return the limits of ``tenant``."""
    return defaults.with_own(await session.scalar(_OWN, {"tenant": tenant}))


async def set_tenant(
    transaction: AsyncSession, *, name: str, limits: Mapping[str, int | None], share: float | None = None
) -> None:
    """Give the tenant of that name own limits, and a share. A limit of None goes back to the default.

    Raises ``NotFound``, and ``InvalidRequest`` for an unknown limit or a value out of range.
    """
    for limit, value in limits.items():
        if limit not in LIMIT_NAMES:
            raise InvalidRequest(f"no limit is named {limit[:50]!r}; the limits are {', '.join(LIMIT_NAMES)}")
        if value is not None and not 1 <= value <= MOST:
            raise InvalidRequest(f"{limit} must be 1 to {MOST}, or `default`; got {value}")
    if share is not None and not 0.001 <= share <= 1000:
        raise InvalidRequest(f"share must be 0.001 to 1000; got {share}")
    row = (
        await transaction.execute(select(Tenant.id, Tenant.limits).where(Tenant.name == name).with_for_update())
    ).one_or_none()
    if row is None:
        raise NotFound(f"no tenant is named {name[:100]!r}; `weft tenant list` shows them")
    own = {limit: value for limit, value in {**(row.limits or {}), **limits}.items() if value is not None}
    values: dict[str, object] = {"limits": own or None} | ({} if share is None else {"share": share})
    await transaction.execute(update(Tenant).where(Tenant.id == row.id).values(values))


class Counted(IntEnum):
    """Kind of use that is counted under a lock of its own. The numbers are PostgreSQL's first key of the lock."""

    TRAINING = 5_201
    SAMPLES = 5_202
    SESSIONS = 5_203
    RUNS = 5_204
    STORAGE = 5_205
    SAMPLERS = 5_206
    RECORDS = 5_208
    TOLD_ENDS = 5_207
    """A lane's lock, not a tenant's (``ledger.told_ends``)."""


# Sorted, so that two transactions that lock several tenants cannot deadlock.
_LOCK = text(
    "SELECT pg_advisory_xact_lock(:space, number) FROM "
    "(SELECT DISTINCT hashtext(name) AS number FROM unnest(CAST(:tenants AS text[])) AS name ORDER BY 1) AS sorted"
)


async def hold_count(transaction: AsyncSession, counted: Counted, tenants: Collection[TenantId]) -> None:
    """Let no other transaction add to this use of ``tenants`` until the transaction ends.

    A query that comes after this sees all that others have added. The lock is on no row: nothing but another addition of the
    same kind, by the same tenant, waits for it.
    """
    # SQLite has one writer anyway.
    if transaction.get_bind().dialect.name != "sqlite":
        await transaction.execute(_LOCK, {"space": int(counted), "tenants": list(tenants)})
