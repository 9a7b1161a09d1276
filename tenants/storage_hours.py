"""Storage of tenants by hour: the bytes of their checkpoints, read once an hour.

An hour in which nobody read them, since no process ran, has the bytes of the next reading: nobody can save or delete then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Self

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.inserts import insert_unless_present
from store.tables import Checkpoint, Run, ServicePresence, Session, StorageHour, Tenant
from tenants.reach import Owner, Reach, default_project, reached_sessions, tenant_of

HOUR = timedelta(hours=1)
MOST_ROWS = 1000
"""Most hours of projects that one transaction records: a transaction of SQLite's holds the event loop."""
_MOST_MISSED = 14 * 24
"""Hours without a reading that are filled: after a longer silence of the service the oldest are left out."""


@dataclass(frozen=True, slots=True)
class StoredNow:
    """Checkpoints of one project, their number and their bytes."""

    project: str
    checkpoints: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StorageLine:
    """Bytes stored throughout the hour that begins at ``hour``."""

    hour: datetime
    project: str
    nbytes: int


async def stored_now(session: AsyncSession, owner: Owner) -> list[StoredNow]:
    """Return what the owner stores now, by project."""
    tenant = tenant_of(owner)
    project = func.coalesce(Session.project, default_project(tenant))
    rows = await session.execute(
        select(project.label("project"), func.count().label("number"), func.sum(Checkpoint.size_bytes).label("nbytes"))
        .select_from(Checkpoint)
        .join(Run, Run.id == Checkpoint.run_id)
        .join(Session, Session.id == Run.session_id)
        .where(Checkpoint.tenant_id == tenant, *reached_sessions(owner))
        .group_by(project)
        .order_by(project)
    )
    return [StoredNow(row.project, row.number, int(row.nbytes)) for row in rows]


@dataclass(frozen=True, slots=True)
class StorageWalk:
    """Walk over all tenants that meters the hours from ``first`` on and before ``end``; ``after`` is the last tenant seen."""

    first: datetime
    end: datetime
    after: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the walk of that text."""
        first, end, after = text.split(" ")
        return cls(datetime.fromisoformat(first), datetime.fromisoformat(end), after)

    def __str__(self) -> str:
        return f"{self.first.isoformat()} {self.end.isoformat()} {self.after}"


async def begin_walk(session: AsyncSession, now: datetime) -> StorageWalk:
    """Return the walk over the whole hours that no walk has metered; the last one before the first walk."""
    end = _hour_of(now)
    return StorageWalk(max(await metered_to(session, now), end - _MOST_MISSED * HOUR), end)


async def metered_to(session: AsyncSession, now: datetime) -> datetime:
    """Return the end of the hours whose storage no walk changes any more."""
    recorded = await session.scalar(select(ServicePresence.storage_metered_to))
    return _hour_of(now) - HOUR if recorded is None else recorded


def _hour_of(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


async def meter_storage(
    transaction: AsyncSession, walk: StorageWalk, *, most: int, most_rows: int = MOST_ROWS
) -> tuple[int, StorageWalk | None]:
    """Record what the next ``most`` tenants store now as their storage of the walk's hours; a recorded hour stays as it is.

    A transaction records ``most_rows`` rows, or one hour of a tenant. The walk then stays before the tenant that has hours left.

    Return the number of tenants that store anything, and the walk after them, None at its end, or if another walk has come there.
    """
    hours = [walk.first + place * HOUR for place in range(int((walk.end - walk.first) / HOUR))]
    # Held: two processes that walk at the same time meter one after the other.
    recorded = await transaction.scalar(select(ServicePresence.storage_metered_to).with_for_update())
    if not hours or (recorded is not None and recorded >= walk.end):
        return 0, None
    tenants = (
        await transaction.scalars(select(Tenant.id).where(Tenant.id > walk.after).order_by(Tenant.id).limit(most))
    ).all()
    metered = await _metered_hours(transaction, tenants, walk)
    rows: list[dict[str, object]] = []
    storing = 0
    for tenant in tenants:
        stored = await stored_now(transaction, TenantId(tenant))
        storing += bool(stored)
        # A reading of another moment would add the bytes of a session that has changed its project to those recorded before.
        left = [hour for hour in hours if (tenant, hour) not in metered] if stored else []
        fits = max((most_rows - len(rows)) // max(len(stored), 1), 0 if rows else 1)
        rows += [_row(tenant, hour, one) for hour in left[:fits] for one in stored]
        if len(left) > fits:
            break
        walk = replace(walk, after=tenant)
    if rows:
        await transaction.execute(insert_unless_present(transaction, StorageHour), rows)
    if len(tenants) == most or (tenants and walk.after != tenants[-1]):
        return storing, walk
    await transaction.execute(update(ServicePresence).values(storage_metered_to=walk.end))
    return storing, None


async def _metered_hours(session: AsyncSession, tenants: Sequence[str], walk: StorageWalk) -> set[tuple[str, datetime]]:
    """Return the walk's hours of each of the tenants that have a row."""
    recorded = select(StorageHour.tenant_id, StorageHour.hour).where(
        StorageHour.tenant_id.in_(tenants), StorageHour.hour >= walk.first, StorageHour.hour < walk.end
    )
    return {(row.tenant_id, row.hour) for row in await session.execute(recorded.distinct())}


def _row(tenant: str, hour: datetime, stored: StoredNow) -> dict[str, object]:
    return {
        "tenant_id": tenant,
        "hour": hour,
        "project": stored.project,
        "nbytes": stored.nbytes,
        "checkpoints": stored.checkpoints,
    }


async def stored_hours(session: AsyncSession, owner: Owner, *, since: datetime, before: datetime) -> list[datetime]:
    """Return the hours from ``since`` on and before ``before`` in which the owner's tenant stored anything, in order."""
    found = await session.scalars(
        select(StorageHour.hour)
        .where(StorageHour.tenant_id == tenant_of(owner), StorageHour.hour >= since, StorageHour.hour < before)
        .distinct()
        .order_by(StorageHour.hour)
    )
    return list(found)


async def storage_lines(
    session: AsyncSession, owner: Owner, *, since: datetime, before: datetime, limit: int
) -> list[StorageLine]:
    """Return the owner's storage in the hours that begin from ``since`` on and before ``before``, in order of time."""
    rows = await session.scalars(
        select(StorageHour)
        .where(*_hours_of(owner, since, before))
        .order_by(StorageHour.hour, StorageHour.project)
        .limit(limit)
    )
    return [StorageLine(row.hour, row.project, row.nbytes) for row in rows]


async def count_storage_lines(
    session: AsyncSession, owner: Owner, *, since: datetime, before: datetime, most: int
) -> int:
    """Return how many lines ``storage_lines`` has, ``most`` if it has more."""
    lines = select(StorageHour.hour).where(*_hours_of(owner, since, before)).limit(most)
    return await session.scalar(select(func.count()).select_from(lines.subquery())) or 0


def _hours_of(owner: Owner, since: datetime, before: datetime) -> list[ColumnElement[bool]]:
    of_projects = [StorageHour.project.in_(sorted(owner.projects))] if isinstance(owner, Reach) else []
    return [
        StorageHour.tenant_id == tenant_of(owner),
        StorageHour.hour >= since,
        StorageHour.hour < before,
        *of_projects,
    ]
