"""Facts of weight versions for readers: the path of each, and the optimizer step of its run that it was saved after."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
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
    ended = (RunPoint.run_id == Checkpoint.run_id, RunPoint.at <= Checkpoint.created_at)
    step = select(func.coalesce(func.max(RunPoint.step), 0)).where(*ended).scalar_subquery()
    of_tenant = (Checkpoint.id.in_(few_lengths(sorted(versions))), Checkpoint.tenant_id == tenant_of(owner))
    rows = await session.execute(select(Checkpoint, step.label("step")).where(*of_tenant))
    return {
        row.id: VersionFacts(row.id, row.run_id, str(path_of(row)) if row.listed else None, steps, row.created_at)
        for row, steps in rows
    }
