"""Records of samples that training may name: written with the result, kept for a day and not beyond their session."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from sqlalchemy import LargeBinary, Table, and_, bindparam, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId, TenantId
from contracts.provenance import HEADER_BYTES, decoded_bytes
from store.batcher import few_lengths
from store.inserts import insert_unless_present
from store.tables import Sampler, SampleRecord, Session

MOST_READ = 256
"""Most records read by one query: bounds memory."""

_records = cast(Table, SampleRecord.__table__)
_samplers = cast(Table, Sampler.__table__)
_sessions = cast(Table, Session.__table__)

_SESSIONS = select(_samplers.c.id, _samplers.c.session_id).where(
    _samplers.c.id.in_(bindparam("samplers", expanding=True))
)
_OF_SESSION = and_(_sessions.c.id == _records.c.session_id, _sessions.c.tenant_id == _records.c.tenant_id)
_IS_NAMED = and_(
    _records.c.operation_id.in_(bindparam("ids", expanding=True)),
    _records.c.tenant_id == bindparam("tenant"),
    _records.c.expires_at > bindparam("now"),
    _sessions.c.ended_at.is_(None),
)
_BODIES = select(_records.c.operation_id, _records.c.body).join(_sessions, _OF_SESSION).where(_IS_NAMED)
_BEGINNINGS = (
    select(_records.c.operation_id, func.substr(_records.c.body, 1, HEADER_BYTES, type_=LargeBinary).label("beginning"))
    .join(_sessions, _OF_SESSION)
    .where(_IS_NAMED)
)
_EXPIRED = select(_records.c.operation_id).where(_records.c.expires_at <= bindparam("now")).limit(bindparam("most"))
_ENDED = (
    select(_records.c.operation_id)
    .join(_sessions, _sessions.c.id == _records.c.session_id)
    .where(_sessions.c.ended_at <= bindparam("ended_before"), _sessions.c.ended_at > bindparam("ended_after"))
    .limit(bindparam("most"))
)
_FORGET = delete(_records).where(_records.c.operation_id.in_(bindparam("ids", expanding=True)))


@dataclass(frozen=True, slots=True)
class NewRecord:
    """The record of a sample, as ``contracts.provenance`` bytes."""

    operation: RequestId
    tenant: TenantId
    sampler: str
    body: bytes


async def record_samples(
    transaction: AsyncSession, records: Collection[NewRecord], *, now: datetime, expires_at: datetime
) -> None:
    """Insert the records. One that is there already stays."""
    if not records:
        return
    asked = {"samplers": few_lengths(sorted({one.sampler for one in records}))}
    sessions = {row.id: row.session_id for row in await transaction.execute(_SESSIONS, asked)}
    rows = [
        {
            "operation_id": one.operation,
            "tenant_id": one.tenant,
            "session_id": sessions[one.sampler],
            "body": one.body,
            "created_at": now,
            "expires_at": expires_at,
        }
        for one in records
        if one.sampler in sessions
    ]
    if rows:
        await transaction.execute(insert_unless_present(transaction, SampleRecord), rows)


async def recorded_samples(
    session: AsyncSession, tenant: TenantId, ids: Sequence[str], *, now: datetime
) -> dict[str, bytes]:
    """Return the tenant's records of these samples, at most ``MOST_READ``; leave out those that are gone."""
    rows = await session.execute(_BODIES, {"ids": few_lengths(ids), "tenant": tenant, "now": now})
    return {row.operation_id: row.body for row in rows}


async def record_sizes(session: AsyncSession, tenant: TenantId, ids: Sequence[str], *, now: datetime) -> dict[str, int]:
    """Return the bytes of the records that ``recorded_samples`` returns, once decompressed; it reads their beginnings only."""
    rows = await session.execute(_BEGINNINGS, {"ids": few_lengths(ids), "tenant": tenant, "now": now})
    return {row.operation_id: decoded_bytes(row.beginning) for row in rows}


async def forget_sample_records(
    transaction: AsyncSession, *, now: datetime, ended_after: datetime, ended_before: datetime, most: int
) -> int:
    """Delete at most ``most`` records that have expired or whose session ended between the two times; return how many."""
    ids = list((await transaction.scalars(_EXPIRED, {"now": now, "most": most})).all())
    if len(ids) < most:
        keys = {"ended_after": ended_after, "ended_before": ended_before, "most": most - len(ids)}
        ids = list({*ids, *(await transaction.scalars(_ENDED, keys)).all()})
    if ids:
        await transaction.execute(_FORGET, {"ids": few_lengths(ids)})
    return len(ids)
