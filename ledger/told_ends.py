"""Numbers of samples' ends, by which a client that polls for a whole lane tells what it has been told already.

A sample's end gets its number when a poll first sees it, not when it is written: under a lock of the lane, above every
number of the lane. Whoever holds the lock sees all ends that are committed, and an end that is committed later gets a
higher number. So no end is below a number that was told before it, in whatever order writers' transactions end.

A number is at least the time in microseconds: housekeeping may delete the rows with a lane's highest numbers, and the next
number is above them still.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, func, literal_column, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId, TenantId
from contracts.ledger_records import OperationState
from ledger.statements import operations
from store.clock import Clock
from store.database import Database
from store.pending_operations import IS_PENDING, IS_SAMPLE
from tenants.limits import Counted

MOST_ENDS = 1000
"""Most ends that one look numbers or returns."""

_IS_ENDED_SAMPLE = (operations.c.kind == literal_column("'sample'")) & operations.c.finished_at.is_not(None)
_OF_LANE = (
    _IS_ENDED_SAMPLE,
    operations.c.lane == bindparam("lane"),
    operations.c.tenant_id == bindparam("tenant"),
)
_TOLD = (
    select(operations.c.id, operations.c.seq_id, operations.c.state, operations.c.result_bytes, operations.c.told_as)
    .where(*_OF_LANE, operations.c.told_as > bindparam("after"))
    .order_by(operations.c.told_as)
    .limit(MOST_ENDS)
)
_IS_UNTOLD = select(func.count()).select_from(
    select(operations.c.position).where(*_OF_LANE, operations.c.told_as.is_(None)).limit(1).subquery()
)
_UNTOLD = (
    select(operations.c.position)
    .where(*_OF_LANE, operations.c.told_as.is_(None))
    .order_by(operations.c.position)
    .limit(MOST_ENDS)
    .with_for_update(skip_locked=True)
)
"""Rows that housekeeping has locked are left to the next look."""
_HIGHEST = select(func.max(operations.c.told_as)).where(*_OF_LANE)
_TELL = update(operations).where(operations.c.position == bindparam("at")).values(told_as=bindparam("number"))
_FIRST_PENDING = (
    select(operations.c.id)
    .where(
        IS_PENDING,
        IS_SAMPLE,
        operations.c.tenant_id == bindparam("tenant"),
        operations.c.lane == bindparam("lane"),
        operations.c.seq_id >= bindparam("first"),
        operations.c.seq_id < bindparam("before"),
    )
    .order_by(operations.c.seq_id)
    .limit(1)
)
_LOCK = text("SELECT pg_advisory_xact_lock(:space, hashtext(:lane))")


@dataclass(frozen=True, slots=True)
class ToldEnd:
    """The end of a sample. ``number`` grows from one end of the lane to the next."""

    number: int
    id: RequestId
    seq_id: int
    is_done: bool
    result_bytes: int | None


async def first_pending_sample(
    session: AsyncSession, tenant: TenantId, lane: str, *, first: int, before: int
) -> RequestId | None:
    """Return the lane's sample with the lowest ``seq_id`` from ``first`` to below ``before`` that has not ended."""
    found = await session.scalar(_FIRST_PENDING, {"tenant": tenant, "lane": lane, "first": first, "before": before})
    return None if found is None else RequestId(found)


async def ends_after(database: Database, tenant: TenantId, lane: str, after: int, clock: Clock) -> list[ToldEnd]:
    """Return the ends of the tenant's lane with numbers above ``after``, by number, at most ``MOST_ENDS``.

    Ends that have no number yet get one.
    """
    keys: dict[str, Any] = {"lane": lane, "tenant": tenant, "after": after}
    async with database.read() as session:
        is_untold = await session.scalar(_IS_UNTOLD, keys)
    if is_untold:
        async with database.write() as transaction:
            await _number(transaction, keys, clock())
    async with database.read() as session:
        return [_end(row) for row in await session.execute(_TOLD, keys)]


async def _number(transaction: AsyncSession, keys: dict[str, Any], now: datetime) -> None:
    if transaction.get_bind().dialect.name != "sqlite":
        # SQLite has one writer anyway.
        await transaction.execute(_LOCK, {"space": int(Counted.TOLD_ENDS), "lane": keys["lane"]})
    positions: Sequence[int] = (await transaction.scalars(_UNTOLD, keys)).all()
    if positions:
        highest = await transaction.scalar(_HIGHEST, keys) or 0
        first = max(highest, keys["after"], int(now.timestamp() * 1_000_000)) + 1
        told = [{"at": position, "number": first + place} for place, position in enumerate(positions)]
        await transaction.execute(_TELL, told)


def _end(row: Any) -> ToldEnd:
    return ToldEnd(row.told_as, RequestId(row.id), row.seq_id, row.state == OperationState.DONE, row.result_bytes)
