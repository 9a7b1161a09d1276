"""Suspension of tenants: accepted work waits, and nothing is lost. The mode says what else is refused (``SuspendMode``).

Trainers and sampling processes leave a suspended tenant's work alone; polls answer "try again" with the operator's reason.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound
from contracts.ids import TenantId
from contracts.webhooks import EventKind
from store.tables import Tenant
from tenants.forced_silence import is_blocked
from tenants.rights import LENIENT, SuspendMode, blocked, known_mode, read_only
from tenants.webhook_events import TenantEvent, record_events

MOST_CHARACTERS = 500
"""Longest reason."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A tenant's suspension. ``reason`` is what its clients read."""

    since: datetime
    reason: str | None
    mode: SuspendMode = SuspendMode.HOLD


async def suspend_tenant(
    transaction: AsyncSession,
    *,
    name: str,
    reason: str | None,
    now: datetime,
    mode: SuspendMode = SuspendMode.HOLD,
) -> TenantId:
    """Suspend the named tenant, or give its suspension another mode and reason.

    Raises ``NotFound``, ``InvalidRequest`` for a tenant that is to be deleted.
    """
    tenant = await _named(transaction, name)
    set_mode(tenant, mode, since=tenant.suspended_at or now, now=now)
    tenant.suspend_reason = None if reason is None else reason[:MOST_CHARACTERS]
    await transaction.flush()
    await tell_suspension(transaction, tenant, now)
    return TenantId(tenant.id)


def set_mode(tenant: Tenant, mode: str | None, *, since: datetime | None, now: datetime) -> None:
    """Have the tenant suspended in ``mode`` since then, or not at all for None, and note the end of a block."""
    was_blocked = is_blocked(tenant)
    tenant.suspended_at, tenant.suspend_mode = since, mode
    if was_blocked and not is_blocked(tenant):
        tenant.answered_since = now


async def tell_suspension(transaction: AsyncSession, tenant: Tenant, now: datetime) -> None:
    """Tell the tenant's webhooks how it is suspended."""
    id = TenantId(tenant.id)
    told = {"mode": tenant.suspend_mode, "reason": tenant.suspend_reason, "deleted_at": tenant.delete_at}
    await record_events(transaction, [TenantEvent(id, EventKind.TENANT_SUSPENDED, id, told)], now)


async def resume_tenant(transaction: AsyncSession, *, name: str, now: datetime) -> TenantId:
    """End the named tenant's suspension, if there is one.

    Raises ``NotFound``, ``InvalidRequest`` for a tenant that is to be deleted.
    """
    tenant = await _named(transaction, name)
    was_suspended, id = tenant.suspended_at is not None, TenantId(tenant.id)
    set_mode(tenant, None, since=None, now=now)
    tenant.suspend_reason = None
    await transaction.flush()
    if was_suspended:
        await record_events(transaction, [TenantEvent(id, EventKind.TENANT_RESUMED, id, {})], now)
    return id


async def suspensions(session: AsyncSession) -> dict[TenantId, Suspension]:
    """Return every suspended tenant with its suspension."""
    columns = select(Tenant.id, Tenant.suspended_at, Tenant.suspend_reason).where(Tenant.suspended_at.is_not(None))
    rows = await session.execute(columns)
    return {TenantId(row.id): Suspension(row.suspended_at, row.suspend_reason) for row in rows}


async def blocked_tenants(session: AsyncSession) -> dict[TenantId, str | None]:
    """Return the reasons of the tenants that are blocked. A mode that only another version knows counts as blocked."""
    columns = select(Tenant.id, Tenant.suspend_reason).where(
        Tenant.suspended_at.is_not(None), Tenant.deleted_at.is_(None), Tenant.suspend_mode.not_in(LENIENT)
    )
    return {TenantId(row.id): row.suspend_reason for row in await session.execute(columns)}


def check_stays(tenant: Tenant) -> None:
    """Raise ``InvalidRequest`` for a tenant that is to be deleted, or is."""
    if tenant.deleted_at is not None:
        raise InvalidRequest(f"tenant {tenant.name!r} is deleted; make another one")
    if tenant.delete_at is not None:
        raise InvalidRequest(f"tenant {tenant.name!r} is to be deleted; restore it first (`weft tenant restore`)")


async def hold_working(transaction: AsyncSession, tenant: TenantId) -> None:
    """Keep the tenant as it is until the transaction ends. Raises ``Suspended`` for one that takes no new work.

    Who suspends or deletes it waits; its own other rows are made meanwhile.
    """
    query = select(Tenant.suspended_at, Tenant.suspend_mode, Tenant.suspend_reason).where(Tenant.id == tenant)
    row = (await transaction.execute(query.with_for_update(read=True, key_share=True))).one()
    mode = None if row.suspended_at is None else known_mode(row.suspend_mode)
    if mode is SuspendMode.BLOCKED:
        raise blocked(row.suspend_reason)
    if mode is SuspendMode.READ_ONLY:
        raise read_only(row.suspend_reason)


async def _named(session: AsyncSession, name: str) -> Tenant:
    """Return the tenant of that name, locked: its deletion and its suspension change one after the other."""
    found = await session.scalar(select(Tenant).where(Tenant.name == name).with_for_update())
    if found is None:
        raise NotFound(f"no tenant is named {name[:100]!r}; `weft tenant list` shows them")
    check_stays(found)
    return found
