"""Records of samples that training may name: written with the result, kept for a day and not beyond their session.

Each training that names a record begins its day anew.

A tenant's records together have a limit (``sample_record_bytes``). Each has a place in the row of all bytes that the tenant
has recorded, so what is farther behind the newest record than the limit is found without adding anything up.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from sqlalchemy import LargeBinary, Table, and_, bindparam, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId, TenantId
from contracts.provenance import HEADER_BYTES, decoded_bytes
from store.batcher import few_lengths
from store.inserts import insert_unless_present
from store.tables import Sampler, SampleRecord, Session, Tenant
from tenants.limits import Counted, Limits, hold_count

MOST_READ = 256
"""Most records read by one query: bounds memory."""
LEAST_BYTES = 1024
"""Bytes that a record counts for at least: its row and its places in indexes take room as well."""
_RENEWED_BELOW = 0.75
"""Part of a record's time below which a use renews it: one that is used all the time is written a few times a day."""
_MOST_FORGOTTEN = 20_000
"""Most records that one new record displaces at once; after a limit was lowered, the next ones go on."""

_records = cast(Table, SampleRecord.__table__)
_samplers = cast(Table, Sampler.__table__)
_tenants = cast(Table, Tenant.__table__)
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
    select(
        _records.c.operation_id,
        _records.c.expires_at,
        func.substr(_records.c.body, 1, HEADER_BYTES, type_=LargeBinary).label("beginning"),
    )
    .join(_sessions, _OF_SESSION)
    .where(_IS_NAMED)
)
_RENEW = (
    update(_records)
    .where(
        _records.c.operation_id.in_(
            select(_records.c.operation_id)
            .where(
                _records.c.operation_id.in_(bindparam("ids", expanding=True)),
                _records.c.tenant_id == bindparam("tenant"),
            )
            # One that is locked is being renewed or deleted.
            .with_for_update(skip_locked=True)
        )
    )
    .values(expires_at=bindparam("until"))
)
_EXPIRED = select(_records.c.operation_id).where(_records.c.expires_at <= bindparam("now")).limit(bindparam("most"))
_ENDED = (
    select(_records.c.operation_id)
    .join(_sessions, _sessions.c.id == _records.c.session_id)
    .where(_sessions.c.ended_at <= bindparam("ended_before"), _sessions.c.ended_at > bindparam("ended_after"))
    .limit(bindparam("most"))
)
_FORGET = delete(_records).where(_records.c.operation_id.in_(bindparam("ids", expanding=True)))
_END = (
    select(_records.c.start_byte + _records.c.size_bytes)
    .where(_records.c.tenant_id == _tenants.c.id, _records.c.start_byte.is_not(None))
    .order_by(_records.c.start_byte.desc())
    .limit(1)
    .scalar_subquery()
)
_ENDS = select(_tenants.c.id, _tenants.c.limits, func.coalesce(_END, 0).label("end")).where(
    _tenants.c.id.in_(bindparam("tenants", expanding=True))
)
_PRESENT = select(_records.c.operation_id).where(_records.c.operation_id.in_(bindparam("ids", expanding=True)))
_FARTHEST = (
    select(_records.c.operation_id)
    .where(_records.c.tenant_id == bindparam("tenant"), _records.c.start_byte < bindparam("kept_from"))
    .order_by(_records.c.start_byte)
    .limit(_MOST_FORGOTTEN)
)
_FORGET_FARTHEST = delete(_records).where(_records.c.operation_id.in_(_FARTHEST))


@dataclass(frozen=True, slots=True)
class NewRecord:
    """The record of a sample, as ``contracts.provenance`` bytes."""

    operation: RequestId
    tenant: TenantId
    sampler: str
    body: bytes


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """Bytes of a record once decompressed, and the time of its end."""

    nbytes: int
    expires_at: datetime


async def record_samples(
    transaction: AsyncSession, records: Collection[NewRecord], defaults: Limits, *, now: datetime, expires_at: datetime
) -> None:
    """Insert the records, and forget each tenant's oldest beyond its limit. One that is there already stays."""
    if not records:
        return
    asked = {"samplers": few_lengths(sorted({one.sampler for one in records}))}
    sessions = {row.id: row.session_id for row in await transaction.execute(_SESSIONS, asked)}
    tenants = sorted({one.tenant for one in records})
    await hold_count(transaction, Counted.RECORDS, tenants)
    found = (await transaction.execute(_ENDS, {"tenants": few_lengths(tenants)})).all()
    ends = {row.id: row.end for row in found}
    # A repeat takes no place a second time, so that it displaces nothing.
    ids = few_lengths([one.operation for one in records])
    present = set((await transaction.scalars(_PRESENT, {"ids": ids})).all())
    rows = []
    for one in records:
        if one.sampler not in sessions or one.operation in present:
            continue
        size, start = max(LEAST_BYTES, len(one.body)), ends[one.tenant]
        ends[one.tenant] = start + size
        rows.append(
            {
                "operation_id": one.operation,
                "tenant_id": one.tenant,
                "session_id": sessions[one.sampler],
                "body": one.body,
                "start_byte": start,
                "size_bytes": size,
                "created_at": now,
                "expires_at": expires_at,
            }
        )
    if not rows:
        return
    await transaction.execute(insert_unless_present(transaction, SampleRecord), rows)
    for row in found:
        kept_from = ends[row.id] - defaults.with_own(row.limits).sample_record_bytes
        if kept_from > 0:
            await transaction.execute(_FORGET_FARTHEST, {"tenant": row.id, "kept_from": kept_from})


async def recorded_samples(
    session: AsyncSession, tenant: TenantId, ids: Sequence[str], *, now: datetime
) -> dict[str, bytes]:
    """Return the tenant's records of these samples, at most ``MOST_READ``; leave out those that are gone."""
    rows = await session.execute(_BODIES, {"ids": few_lengths(ids), "tenant": tenant, "now": now})
    return {row.operation_id: row.body for row in rows}


async def record_facts(
    session: AsyncSession, tenant: TenantId, ids: Sequence[str], *, now: datetime
) -> dict[str, RecordFacts]:
    """Return the facts of the records that ``recorded_samples`` returns; it reads their beginnings only."""
    rows = await session.execute(_BEGINNINGS, {"ids": few_lengths(ids), "tenant": tenant, "now": now})
    return {row.operation_id: RecordFacts(decoded_bytes(row.beginning), row.expires_at) for row in rows}


def to_renew(found: Mapping[str, RecordFacts], kept: timedelta, now: datetime) -> list[str]:
    """Return the records, in order, that a use at ``now`` renews. ``kept``: time for which a record is kept after a use."""
    return sorted(id for id, one in found.items() if one.expires_at - now < _RENEWED_BELOW * kept)


async def renew_records(transaction: AsyncSession, tenant: TenantId, ids: Sequence[str], *, until: datetime) -> None:
    """Keep the tenant's records of these samples ``until`` then, at most ``MOST_READ``; a record in other hands is left out."""
    await transaction.execute(_RENEW, {"ids": few_lengths(ids), "tenant": tenant, "until": until})


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
