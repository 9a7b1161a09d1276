"""Lists of checkpoints that are named and have not expired, newest first."""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, exists, func, not_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from contracts.ids import TenantId
from contracts.paths import Segment
from store.batcher import few_lengths
from store.clock import Clock
from store.tables import Checkpoint, Run
from tenants.checkpoints import is_unexpired, reached
from tenants.list_places import Place, behind
from tenants.reach import Owner, tenant_of, within

_NEWEST_FIRST = (Checkpoint.created_at.desc(), Checkpoint.id)
_PAGE = 100
"""Checkpoints that are read at once: each may have 16 KiB of metadata, which is decoded on the event loop."""


@dataclass(frozen=True, slots=True)
class CheckpointFilter:
    """Checkpoints of an owner that are listed and have not expired ``now``; only those that are so, where it is given."""

    owner: Owner
    now: datetime
    segments: Collection[Segment] = tuple(Segment)
    run_id: str | None = None
    name: str | None = None
    public: bool | None = None
    expires_before: datetime | None = None
    bases: Collection[str] | None = None
    """Base models of the checkpoints' runs."""

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions on rows."""
        wanted = [
            Checkpoint.tenant_id == tenant_of(self.owner),
            *reached(self.owner),
            Checkpoint.listed.is_(True),
            Checkpoint.segment.in_(self.segments),
            is_unexpired(self.now),
        ]
        if self.run_id is not None:
            wanted.append(Checkpoint.run_id == self.run_id)
        if self.name is not None:
            wanted.append(Checkpoint.name == self.name)
        if self.public is not None:
            wanted.append(Checkpoint.public.is_(self.public))
        if self.expires_before is not None:
            wanted.append(Checkpoint.expires_at < self.expires_before)
        if self.bases is not None:
            of_bases = Run.base_model.in_(few_lengths(sorted(self.bases)))
            wanted.append(exists().where(Run.id == Checkpoint.run_id, of_bases))
        return wanted


@dataclass(frozen=True, slots=True)
class UnlistedStorage:
    """Storage of an owner that no list of checkpoints shows, and that is removed by itself.

    - ``versions``: checkpoints without a name, and expired ones whose removal is due. ``snapshots``: training snapshots of runs.
    """

    versions: int
    version_bytes: int
    snapshots: int
    snapshot_bytes: int


async def unlisted_storage(session: AsyncSession, owner: Owner, now: datetime) -> UnlistedStorage:
    """Return the part of ``stored_bytes`` and ``checkpoints`` (``tenants.limit_use``) that is not listed."""
    tenant = tenant_of(owner)
    is_listed = and_(Checkpoint.listed.is_(True), is_unexpired(now))
    of_versions = [Checkpoint.tenant_id == tenant, *reached(owner), not_(is_listed)]
    of_runs = [Run.tenant_id == tenant, *within(owner, Run.session_id), Run.snapshot_dir.is_not(None)]
    sizes = (Checkpoint.size_bytes, of_versions), (Run.snapshot_bytes, of_runs)
    sums = [
        (await session.execute(select(func.count(), func.coalesce(func.sum(size), 0)).where(*which))).one()
        for size, which in sizes
    ]
    (versions, version_bytes), (snapshots, snapshot_bytes) = sums
    return UnlistedStorage(versions, int(version_bytes), snapshots, int(snapshot_bytes))


async def count_checkpoints(session: AsyncSession, which: CheckpointFilter) -> int:
    """Count the checkpoints."""
    return await session.scalar(select(func.count()).select_from(Checkpoint).where(*which.conditions())) or 0


async def list_checkpoints(session: AsyncSession, which: CheckpointFilter, *, limit: int) -> list[Checkpoint]:
    """Return the newest ``limit`` checkpoints without their metadata."""
    page = select(Checkpoint).where(*which.conditions()).order_by(*_NEWEST_FIRST).limit(limit)
    return list(await session.scalars(page.options(defer(Checkpoint.user_metadata, raiseload=True))))


async def checkpoint_pages(
    session: AsyncSession,
    which: CheckpointFilter,
    *,
    limit: int | None = None,
    offset: int = 0,
    after: Place | None = None,
) -> AsyncIterator[Sequence[Checkpoint]]:
    """Iterate over at most ``limit`` checkpoints, newest first, in pages: a run may have twenty thousand.

    They begin ``offset`` rows behind ``after``.
    """
    wanted, left = which.conditions(), limit
    while left is None or left > 0:
        most = _PAGE if left is None else min(_PAGE, left)
        begins = behind(Checkpoint.created_at, Checkpoint.id, after)
        page = select(Checkpoint).where(*wanted, *begins).order_by(*_NEWEST_FIRST).limit(most).offset(offset)
        rows = (await session.scalars(page)).all()
        yield rows
        if len(rows) < most:
            return
        after, offset, left = Place.of(rows[-1]), 0, None if left is None else left - most


async def latest_checkpoints(
    session: AsyncSession, tenant: TenantId, run_ids: Sequence[str], clock: Clock
) -> dict[tuple[str, str], Checkpoint]:
    """Return the newest listed, unexpired checkpoint of each ``(run_id, segment)`` of the runs, in one query."""
    age = func.row_number().over(
        partition_by=(Checkpoint.run_id, Checkpoint.segment),
        order_by=(Checkpoint.created_at.desc(), Checkpoint.id),
    )
    ranked = (
        select(Checkpoint.id, age.label("age"))
        .where(
            Checkpoint.tenant_id == tenant,
            Checkpoint.run_id.in_(run_ids),
            Checkpoint.listed.is_(True),
            is_unexpired(clock()),
        )
        .subquery()
    )
    newest = select(Checkpoint).join(ranked, ranked.c.id == Checkpoint.id).where(ranked.c.age == 1)
    return {(row.run_id, row.segment): row for row in await session.scalars(newest)}
