"""Facts of weight versions for readers: the path of each, and the optimizer step of its run that it was saved after."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import CTE, ColumnElement, and_, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.batcher import few_lengths
from store.tables import Checkpoint, RunPoint
from tenants.checkpoints import path_of
from tenants.reach import Owner, tenant_of


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """A version: ``step`` is the last optimizer step of its run before it was saved, 0 before the first.

    ``path`` is None for a version without a name.
    """

    id: str
    run: str
    path: str | None
    step: int
    created_at: datetime


async def version_facts(session: AsyncSession, owner: Owner, versions: Collection[str]) -> dict[str, VersionFacts]:
    """Return the facts of the owner's versions by their ids, without those that were deleted or are another tenant's."""
    if not versions:
        return {}
    of_tenant = (Checkpoint.id.in_(few_lengths(sorted(versions))), Checkpoint.tenant_id == tenant_of(owner))
    steps = _steps(of_tenant)
    rows = await session.execute(
        select(Checkpoint, func.coalesce(steps.c.step, 0)).join(steps, steps.c.id == Checkpoint.id).where(*of_tenant)
    )
    return {
        row.id: VersionFacts(row.id, row.run_id, str(path_of(row)) if row.listed else None, step, row.created_at)
        for row, step in rows
    }


def _steps(wanted: Sequence[ColumnElement[bool]]) -> CTE:
    """Return a table of the wanted versions with the last step before each.

    It goes from a run's newest version to its oldest, and looks for each step before the last one found: so many versions of
    a long run read its points once.
    """
    place = func.row_number().over(
        partition_by=Checkpoint.run_id, order_by=(Checkpoint.created_at.desc(), Checkpoint.id)
    )
    ordered = select(Checkpoint.id, Checkpoint.run_id, Checkpoint.created_at, place.label("place")).where(*wanted)
    versions = ordered.cte("versions")
    ended = (RunPoint.run_id == versions.c.run_id, RunPoint.at <= versions.c.created_at)
    newest = select(func.max(RunPoint.step)).where(*ended)
    columns = (versions.c.id, versions.c.run_id, versions.c.place)
    first = select(*columns, newest.correlate(versions).scalar_subquery().label("step")).where(versions.c.place == 1)
    steps = first.cte("steps", recursive=True)
    before = newest.where(RunPoint.step <= steps.c.step).correlate(versions, steps).scalar_subquery()
    older = and_(versions.c.run_id == steps.c.run_id, versions.c.place == steps.c.place + 1)
    return steps.union_all(select(*columns, before).join_from(steps, versions, older))
