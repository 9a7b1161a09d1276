"""Retention of checkpoints: those that have expired go, and versions without a name that nobody samples from.

The folders of deleted rows are discarded (``tenants.discarded_folders``).
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, exists, func, literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from contracts.ids import TenantId
from store.pending_operations import IS_PENDING, IS_SAMPLE
from store.tables import Checkpoint, Operation, SampleInFlight, Sampler, Session
from store.walk import Place
from tenants.audit import HOUSEKEEPING, record, session_of
from tenants.audit_actions import Action
from tenants.checkpoints import path_of
from tenants.discarded_folders import discard
from tenants.forced_silence import were_answered


@dataclass(frozen=True, slots=True)
class VersionRules:
    """Rules that keep a version without a name. Any one of them is enough.

    - It was made after ``idle_since``, or a sample draws from it now.
    - A live sampler of an open session follows it.
    - A pinned sampler of an open session has it, and it is among the ``newest`` of its run.
    - A pinned sampler of an open session has drawn from it since ``idle_since``, or is to.
    - A session that has a sampler of it ended after ``ended_before``.
    """

    newest: int
    idle_since: datetime
    ended_before: datetime


@dataclass(frozen=True, slots=True)
class Retired:
    """Number of the deleted checkpoints, and where the walk goes on: None at its end."""

    discarded: int
    next: Place | None


async def delete_expired(transaction: AsyncSession, *, now: datetime, most: int) -> int:
    """Delete at most ``most`` checkpoints whose time to live is over. Return how many."""
    expired = select(Checkpoint).where(Checkpoint.expires_at <= now).order_by(Checkpoint.expires_at).limit(most)
    # Locked: two processes that expire the same checkpoint tell of it once.
    expired = expired.with_for_update(skip_locked=True)
    rows = list(await transaction.scalars(expired))
    for row in rows:
        transaction.expunge(row)
        if row.listed:
            path, told = str(path_of(row)), {"expires_at": row.expires_at, "size_bytes": row.size_bytes}
            await record(
                transaction,
                HOUSEKEEPING,
                Action.CHECKPOINT_EXPIRE,
                path,
                tenant=TenantId(row.tenant_id),
                now=now,
                session_id=session_of(row.run_id),
                before=told,
            )
    return await discard(transaction, [row.id for row in rows], now)


async def retire_versions(
    transaction: AsyncSession, rules: VersionRules, *, now: datetime, after: Place | None, most: int
) -> Retired:
    """Delete the versions without a name that no rule keeps, among the next ``most`` by age."""
    query = (
        select(Checkpoint.id, Checkpoint.created_at, _is_in_use(rules).label("is_in_use"))
        # Literal, as in the partial index: SQLAlchemy would render a comparison on SQLite.
        .where(literal_column("NOT checkpoints.listed"), Checkpoint.created_at < rules.idle_since)
        .where(were_answered(Checkpoint.tenant_id, rules.idle_since))
        .order_by(Checkpoint.created_at, Checkpoint.id)
        .limit(most)
    )
    if after is not None:
        query = query.where(after.precedes(Checkpoint.created_at, Checkpoint.id))
    seen = (await transaction.execute(query)).all()
    discarded = await discard(transaction, [row.id for row in seen if not row.is_in_use], now)
    return Retired(discarded, Place(seen[-1].created_at, seen[-1].id) if len(seen) == most else None)


def _is_in_use(rules: VersionRules) -> ColumnElement[bool]:
    waits = exists().where(
        IS_PENDING, IS_SAMPLE, Operation.tenant_id == Sampler.tenant_id, Operation.lane == Sampler.id
    )
    newer = aliased(Checkpoint, name="newer")
    has_enough_newer = (
        select(newer.id)
        .where(newer.run_id == Checkpoint.run_id, literal_column("NOT newer.listed"))
        .where(newer.created_at > Checkpoint.created_at)
        .order_by(newer.created_at)
        .offset(max(0, rules.newest - 1))
        .limit(1)
        .correlate(Checkpoint)
        .exists()
    )
    is_used = or_(
        Sampler.live_run_id.is_not(None),
        Sampler.created_at >= rules.idle_since,
        waits,
        ~has_enough_newer,
        # Last: all samples of an idle sampler are read for it.
        _has_drawn(rules),
    )
    is_drawn = exists().where(SampleInFlight.run_id == Checkpoint.run_id, SampleInFlight.version == Checkpoint.id)
    has_sampler = (
        select(Sampler.id)
        .join(Session, Session.id == Sampler.session_id)
        .where(
            Sampler.checkpoint_id == Checkpoint.id,
            or_(Session.ended_at >= rules.ended_before, and_(Session.ended_at.is_(None), is_used)),
        )
        .correlate(Checkpoint)
        .exists()
    )
    return or_(is_drawn, has_sampler)


def _has_drawn(rules: VersionRules) -> ColumnElement[bool]:
    """Return the condition that a sampler has a sample since ``idle_since``.

    Numbers say nothing of time: each copy of a client counts from a number of its own. They are read from the highest on, since
    the last samples of a sampler in use mostly have those; an EXISTS would begin with the lowest.
    """
    at = func.coalesce(Operation.finished_at, Operation.created_at)
    sample = select(Operation.position).where(Operation.lane == Sampler.id, at >= rules.idle_since)
    newest = sample.order_by(Operation.seq_id.desc()).limit(1).correlate(Sampler)
    return newest.scalar_subquery().is_not(None)
