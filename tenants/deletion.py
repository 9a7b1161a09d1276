"""Deletion of tenants in two steps: an operator marks one, and after the grace time housekeeping removes what it has.

Until the grace time ends the tenant is suspended and can be restored. Then its keys are revoked, its sessions and jobs end and
its checkpoints expire, so that the ordinary steps of housekeeping remove rows and folders. Once no file is left, texts of the
tenant's are scrubbed from the rows that stay. Usage and audit stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CursorResult,
    Delete,
    String,
    Update,
    UpdateBase,
    cast,
    delete,
    exists,
    func,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from contracts.webhooks import EventKind
from store.tables import (
    AdapterGate,
    ApiKey,
    Checkpoint,
    ClientException,
    DeletedCheckpoint,
    DirectedRun,
    DiscardedFolder,
    DownloadLink,
    Operation,
    Project,
    Run,
    RunMetric,
    RunPoint,
    SampleRecord,
    Session,
    Tenant,
    WeightJob,
)
from store.tables.runs import HAS_COVERED_PAYLOADS, IS_OPEN
from tenants.rights import SuspendMode
from tenants.suspensions import MOST_CHARACTERS, set_mode, tell_suspension
from tenants.webhook_events import TenantEvent, record_events
from tenants.webhooks import delete_webhooks
from tenants.weight_jobs import drop_jobs

END_REASON = "tenant_deleted"
"""Reason with which a deleted tenant's sessions end."""
LONGEST_GRACE = timedelta(days=3650)
_IN_FLIGHT = timedelta(hours=1)
"""Time for which a tenant's end waits at least: requests and jobs that were in flight when its removal began have ended then."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Checkpoints of a tenant that go with it, and their bytes."""

    checkpoints: int
    nbytes: int


async def mark_for_deletion(
    transaction: AsyncSession, tenant: Tenant, *, grace: timedelta, mode: SuspendMode, reason: str | None, now: datetime
) -> None:
    """Suspend the tenant, and have what it has removed after ``grace``. A tenant that is marked gets another time.

    The caller has locked the row. Raises ``InvalidRequest`` once the removal has begun, and for too long a grace.
    """
    if not timedelta() <= grace <= LONGEST_GRACE:
        raise InvalidRequest(f"grace must be 0 to {LONGEST_GRACE.days} days")
    _check_not_begun(tenant, now)
    if mode is SuspendMode.HOLD:
        raise InvalidRequest("mode: a tenant that is to be deleted is read_only, so that it can export, or blocked")
    ends = now + grace
    told = f"this tenant is deleted for good on {ends:%Y-%m-%d %H:%M} UTC"
    if tenant.delete_at is None and tenant.suspended_at is not None:
        tenant.prior_mode = tenant.suspend_mode or SuspendMode.HOLD
        tenant.prior_reason = tenant.suspend_reason
    set_mode(tenant, mode, since=tenant.suspended_at or now, now=now)
    tenant.suspend_reason = (f"{told}: {reason}" if reason else told)[:MOST_CHARACTERS]
    tenant.delete_at = ends
    await transaction.flush()
    await tell_suspension(transaction, tenant, now)


async def restore(transaction: AsyncSession, tenant: Tenant, now: datetime) -> None:
    """Take back a deletion; an earlier suspension holds again. The caller has locked the row.

    Raises ``InvalidRequest`` for a tenant that is not marked any more.
    """
    if tenant.delete_at is None:
        raise InvalidRequest(f"tenant {tenant.name!r} is not to be deleted; there is nothing to restore")
    _check_not_begun(tenant, now)
    since = None if tenant.prior_mode is None else tenant.suspended_at
    set_mode(tenant, tenant.prior_mode, since=since, now=now)
    tenant.suspend_reason = tenant.prior_reason
    tenant.prior_mode = tenant.prior_reason = tenant.delete_at = None
    await transaction.flush()
    if tenant.suspended_at is not None:
        await tell_suspension(transaction, tenant, now)
    else:
        id = TenantId(tenant.id)
        await record_events(transaction, [TenantEvent(id, EventKind.TENANT_RESUMED, id, {})], now)


def _check_not_begun(tenant: Tenant, now: datetime) -> None:
    if tenant.delete_at is not None and tenant.delete_at <= now:
        raise InvalidRequest(f"the removal of tenant {tenant.name!r} has begun; nothing can be restored")


async def holdings(session: AsyncSession, tenant: TenantId) -> Holdings:
    """Return what the tenant has stored."""
    query = select(func.count(), func.sum(Checkpoint.size_bytes)).where(Checkpoint.tenant_id == tenant)
    count, nbytes = (await session.execute(query)).one()
    return Holdings(count, int(nbytes or 0))


async def next_due(session: AsyncSession, now: datetime, *, after: str) -> TenantId | None:
    """Return the first tenant behind ``after``, in order of ids, whose grace time is over and that still has something.

    One that is deleted and has something all the same is among them.
    """
    due = select(Tenant.id).where(Tenant.id > after, *_is_due(now)).order_by(Tenant.id).limit(1)
    found = await session.scalar(due)
    return None if found is None else TenantId(found)


async def lock_due(transaction: AsyncSession, tenant: TenantId, now: datetime) -> bool:
    """Let nobody restore the tenant until the transaction ends. Return whether it is due still.

    A deleted one with leftovers is not deleted any more: it is removed once more, to the end.
    """
    # Not against inserts of rows that name the tenant: whoever does that may hold locks that the removal needs.
    held = select(Tenant.id).where(Tenant.id == tenant, *_is_due(now)).with_for_update(key_share=True)
    if await transaction.scalar(held) is None:
        return False
    again = update(Tenant).where(Tenant.id == tenant, Tenant.deleted_at.is_not(None)).values(deleted_at=None)
    await _changed(transaction, again)
    return True


def _is_due(now: datetime) -> tuple[ColumnElement[bool], ...]:
    left = [exists().where(table.tenant_id == Tenant.id) for table in (Checkpoint, WeightJob)]
    return (Tenant.delete_at <= now, or_(Tenant.deleted_at.is_(None), *left))


async def end_tenant(transaction: AsyncSession, tenant: TenantId, now: datetime, *, most: int) -> int:
    """Revoke the tenant's keys, end its sessions and webhooks, let ``most`` of its checkpoints expire and end ``most`` of its
    jobs; return how many rows that were.

    The caller has ended its operations.
    """
    of_keys = update(ApiKey).where(ApiKey.tenant_id == tenant, ApiKey.revoked_at.is_(None))
    of_sessions = update(Session).where(Session.tenant_id == tenant, Session.ended_at.is_(None))
    kept = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > now)
    some = select(Checkpoint.id).where(Checkpoint.tenant_id == tenant, kept).limit(most)
    changed = await _changed(
        transaction,
        of_keys.values(revoked_at=now),
        of_sessions.values(ended_at=now, end_reason=END_REASON),
        update(Checkpoint).where(Checkpoint.id.in_(some)).values(expires_at=now),
    )
    # After those: whoever records what a job made locks checkpoints before the job, too.
    changed += await drop_jobs(transaction, tenant, now, most=most)
    # Last: whoever tells of a session or a job has locked it before the webhooks.
    return changed + await delete_webhooks(transaction, tenant)


async def has_remains(session: AsyncSession, tenant: TenantId, now: datetime) -> bool:
    """Return whether files, payloads or results of the tenant are left, or something that may still write some."""
    writes = exists().where(Tenant.id == tenant, Tenant.delete_at > now - _IN_FLIGHT)
    runs = exists().where(Run.tenant_id == tenant, or_(IS_OPEN, Run.snapshot_dir.is_not(None), HAS_COVERED_PAYLOADS))
    # Payloads and results have no index by tenant. They go when their operations are pruned, or as ``runs`` says.
    unpruned = exists().where(
        Operation.tenant_id == tenant, Operation.finished_at.is_not(None), Operation.pruned_at.is_(None)
    )
    files = [exists().where(table.tenant_id == tenant) for table in (Checkpoint, DiscardedFolder, WeightJob)]
    return bool(await session.scalar(select(or_(writes, runs, unpruned, *files))))


async def scrub_tenant(transaction: AsyncSession, tenant: TenantId, now: datetime, *, most: int) -> int:
    """Take the tenant's own texts and numbers out of the rows that stay, ``most`` rows of a table; return how many rows.

    Once none is left, the tenant is deleted and its name is free.
    """
    changed = 0
    for statement in (*_deletions(tenant, most), *_scrubbings(tenant, most)):
        rows = await _changed(transaction, statement)
        changed += rows
        if rows >= most:
            return changed
    named = {"name": f"deleted-{tenant}", "limits": None, "suspend_reason": None, "prior_reason": None}
    await _changed(transaction, update(Tenant).where(Tenant.id == tenant).values(deleted_at=now, **named))
    return changed


def _deletions(tenant: TenantId, most: int) -> Iterator[Delete]:
    own_runs = select(Run.id).where(Run.tenant_id == tenant)
    for table in (DownloadLink, ClientException, SampleRecord, DeletedCheckpoint, DirectedRun, RunMetric, RunPoint):
        # Points and metrics have no index by tenant.
        is_own = table.run_id.in_(own_runs) if table in (RunMetric, RunPoint) else table.tenant_id == tenant
        key = table.__table__.primary_key
        yield delete(table).where(tuple_(*key).in_(select(*key).where(is_own).limit(most)))


def _scrubbings(tenant: TenantId, most: int) -> Iterator[Update]:
    """Yield the changes of rows that stay. A scrubbed row is not changed again."""
    session_texts = (Session.display_name, Session.project_id, Session.end_detail)
    told = [
        _has_value(Session.tags, "[]"),
        _has_value(Session.user_metadata),
        *(one.is_not(None) for one in session_texts),
    ]
    some = select(Session.id).where(Session.tenant_id == tenant, or_(*told)).limit(most)
    blanked = update(Session).where(Session.id.in_(some)).values(tags=[], user_metadata=None, display_name=None)
    yield blanked.values(project_id=None, end_detail=None)
    told = [_has_value(Run.user_metadata), _has_value(Run.metric_names), Run.metric_rows > 0]
    some = select(Run.id).where(Run.tenant_id == tenant, or_(*told)).limit(most)
    yield update(Run).where(Run.id.in_(some)).values(user_metadata=None, metric_names=None, metric_rows=0)
    some = (
        select(AdapterGate.run_id).where(AdapterGate.tenant_id == tenant, AdapterGate.reason.is_not(None)).limit(most)
    )
    yield update(AdapterGate).where(AdapterGate.run_id.in_(some)).values(reason=None)
    keys = select(ApiKey.id).where(ApiKey.tenant_id == tenant, or_(ApiKey.note != "", ApiKey.made_by.is_not(None)))
    yield update(ApiKey).where(ApiKey.id.in_(keys.limit(most))).values(note="", made_by=None)
    some = select(Project.id).where(Project.tenant_id == tenant, Project.name != Project.id).limit(most)
    yield update(Project).where(Project.id.in_(some)).values(name=Project.id)


def _has_value(column: InstrumentedAttribute[Any], empty: str = "null") -> ColumnElement[bool]:
    """Return the condition that a JSON column is not ``empty``. None is stored as NULL or as a JSON null."""
    return func.coalesce(cast(column, String), empty) != empty


async def _changed(transaction: AsyncSession, *statements: UpdateBase) -> int:
    """Execute the statements; return how many rows they have changed."""
    changed = 0
    for statement in statements:
        done = await transaction.execute(statement.execution_options(synchronize_session=False))
        changed += done.rowcount if isinstance(done, CursorResult) else 0
    return changed
