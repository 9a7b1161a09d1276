"""Digests of the audit log: a chain of one hash a day, by which a changed, added or removed entry is found.

A day is closed before it is hashed. Closing waits for the transactions that have written entries, and entries that come later
go to the next day (``tenants.audit``), so neither a slow clock nor a transaction at midnight breaks a digest.

Digest of a day: SHA-256 over a line of JSON that names the day and the digest before, and the line of each entry in order of ids.
"""

import hashlib
import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, cast

from sqlalchemy import Table, delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.inserts import insert_unless_present
from store.tables import AuditDigest, AuditEntry

NO_DIGEST = ""
"""Digest before the first one."""
_PAGE = 500
_DAY = timedelta(days=1)
_entries = cast(Table, AuditEntry.__table__)
_LINE = tuple(column.name for column in _entries.columns)

# Waits for every transaction that has written an entry; entries to come wait for it. One process closes at a time.
_HOLD = text("LOCK TABLE audit_entries IN SHARE ROW EXCLUSIVE MODE")
_NOT_FOR_LONG = text("SET LOCAL lock_timeout = '3s'")


@dataclass(frozen=True, slots=True)
class DayDigest:
    """Digest of the ``entries`` of a day."""

    day: date
    entries: int
    digest: str


@dataclass(slots=True)
class Verification:
    """Outcome of a look at the whole chain.

    ``last``: its newest digest. ``expired_to``: last day whose entries are gone by age.
    """

    days: int = 0
    entries: int = 0
    expired_to: date | None = None
    last: DayDigest | None = None
    problems: list[str] = field(default_factory=list)


async def close_day(transaction: AsyncSession, *, now: datetime) -> date | None:
    """Close the oldest open day before today that has entries, and return it; None if there is none.

    Raises ``Unavailable`` if a transaction that has written an entry does not end within seconds.
    """
    today = now.astimezone(UTC).date()
    if await _oldest_open(transaction, today) is None:
        return None
    if transaction.get_bind().dialect.name != "sqlite":
        # What is to write an entry meanwhile waits behind the lock.
        await transaction.execute(_NOT_FOR_LONG)
        await transaction.execute(_HOLD)
    # Again: an entry of an earlier day may have been on its way.
    day = await _oldest_open(transaction, today)
    if day is not None:
        values = {"day": day, "next_day": day + _DAY, "closed_at": now}
        await transaction.execute(insert_unless_present(transaction, AuditDigest).values(values))
    return day


async def undigested_day(session: AsyncSession) -> date | None:
    """Return the oldest closed day without a digest."""
    found: date | None = await session.scalar(select(func.min(AuditDigest.day)).where(AuditDigest.digest.is_(None)))
    return found


class DayHash:
    """Hash of a closed day in the making. Its entries change no more, so each page of them may be read in another session."""

    def __init__(self, day: date, previous: str) -> None:
        """``previous`` is the digest of the day before."""
        self.day = day
        self._hashed = hashlib.sha256(_json({"day": day.isoformat(), "previous": previous}))
        self._entries = self._last = 0

    async def add_page(self, session: AsyncSession) -> bool:
        """Hash the next entries, and return whether more may follow. A call that is cancelled has hashed none."""
        page = select(_entries).where(_entries.c.day == self.day, _entries.c.id > self._last)
        rows = (await session.execute(page.order_by(_entries.c.id).limit(_PAGE))).all()
        for row in rows:
            self._hashed.update(line_of(row))
            self._entries, self._last = self._entries + 1, row.id
        return len(rows) == _PAGE

    async def finish(self, session: AsyncSession) -> DayDigest:
        """Hash the entries that are left, and return the digest."""
        while await self.add_page(session):
            pass
        return self.digest

    @property
    def digest(self) -> DayDigest:
        """Digest of the entries that are hashed."""
        return DayDigest(self.day, self._entries, self._hashed.hexdigest())


async def begin_digest(session: AsyncSession, day: date) -> DayHash:
    """Begin the digest of a closed day, all days before which have theirs."""
    previous = await session.scalar(
        select(AuditDigest.digest).where(AuditDigest.day < day).order_by(AuditDigest.day.desc()).limit(1)
    )
    return DayHash(day, previous or NO_DIGEST)


async def store_digest(transaction: AsyncSession, found: DayDigest) -> bool:
    """Write a digest. Return False, with nothing written, if another process has."""
    stored = (
        update(AuditDigest)
        .where(AuditDigest.day == found.day, AuditDigest.digest.is_(None))
        .values(digest=found.digest, entries=found.entries)
        .returning(AuditDigest.day)
    )
    return await transaction.scalar(stored.execution_options(synchronize_session=False)) is not None


async def expire_entries(transaction: AsyncSession, *, before: date, now: datetime, most: int) -> int:
    """Delete at most ``most`` entries of digested days before ``before``; return how many. The digests stay."""
    old = (AuditDigest.day < before, AuditDigest.digest.is_not(None))
    await transaction.execute(
        update(AuditDigest)
        .where(*old, AuditDigest.expired_at.is_(None))
        .values(expired_at=now)
        .execution_options(synchronize_session=False)
    )
    expired = select(AuditDigest.day).where(*old)
    oldest = (
        select(AuditEntry.id)
        .where(AuditEntry.day < before, AuditEntry.day.in_(expired))
        .order_by(AuditEntry.day, AuditEntry.id)
        .limit(most)
    )
    gone = delete(AuditEntry).where(AuditEntry.id.in_(oldest)).returning(AuditEntry.id)
    return len((await transaction.execute(gone.execution_options(synchronize_session=False))).all())


async def verify(session: AsyncSession, *, kept_since: date) -> Verification:
    """Compute every digest again and compare. Entries of ``kept_since`` and later may not have expired."""
    done, previous = Verification(), NO_DIGEST
    digests = (await session.scalars(select(AuditDigest).order_by(AuditDigest.day))).all()
    for row in digests:
        if row.digest is None:
            break
        if row.expired_at is not None:
            if row.day >= kept_since:
                done.problems.append(
                    f"{row.day}: its entries were let go before their time, which is {kept_since}; WEFT_RETENTION_AUDIT "
                    "may have been made longer since"
                )
            done.expired_to = row.day
        else:
            found = await DayHash(row.day, previous).finish(session)
            if found.digest != row.digest:
                done.problems.append(_difference(row, found))
            done.days, done.entries = done.days + 1, done.entries + found.entries
        previous = row.digest
        done.last = DayDigest(row.day, row.entries or 0, row.digest)
    done.problems += await _uncovered(session, [row.day for row in digests])
    return done


def _difference(stored: AuditDigest, found: DayDigest) -> str:
    if stored.entries != found.entries:
        return f"{found.day}: the digest was made of {stored.entries} entries, and there are {found.entries}"
    return f"{found.day}: an entry, or the digest before, is not what the digest was made of"


async def _uncovered(session: AsyncSession, days: list[date]) -> list[str]:
    """Return a line for each day with entries that are older than the newest digest, and in none."""
    if not days:
        return []
    stray = (
        select(AuditEntry.day, func.count())
        .where(AuditEntry.day <= max(days), AuditEntry.day.not_in(select(AuditDigest.day)))
        .group_by(AuditEntry.day)
        .order_by(AuditEntry.day)
    )
    return [f"{day}: {count} entries and no digest" for day, count in (await session.execute(stray)).all()]


async def _oldest_open(session: AsyncSession, today: date) -> date | None:
    last = select(func.max(AuditDigest.day)).scalar_subquery()
    open_days = (AuditEntry.day > func.coalesce(last, date.min), AuditEntry.day < today)
    found: date | None = await session.scalar(select(func.min(AuditEntry.day)).where(*open_days))
    return found


def line_of(entry: Any) -> bytes:
    """Return an entry as the line of JSON that a digest is made of: every column, by name."""
    named = {name: getattr(entry, name) for name in _LINE}
    return _json(named | {"at": entry.at.isoformat(), "day": entry.day.isoformat()})


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode() + b"\n"
