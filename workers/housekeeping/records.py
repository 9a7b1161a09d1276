"""Records of housekeeping's steps in the database, for every process and for operators."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from store.inserts import replacing_insert
from store.tables import StepRun
from workers.housekeeping.schedule import StepName


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step's last run, as ``store.tables.StepRun`` describes it."""

    ended_at: datetime
    succeeded_at: datetime | None
    seconds: float
    handled: int
    position: str | None
    behind_since: datetime | None
    failing_since: datetime | None


async def read_record(session: AsyncSession, step: StepName) -> StepRecord | None:
    """Return the step's record, None before its first run."""
    found = await session.get(StepRun, step.value, populate_existing=True)
    return None if found is None else _record(found)


async def read_records(session: AsyncSession) -> dict[StepName, StepRecord | None]:
    """Return the record of every step, in the steps' order."""
    found = {row.name: _record(row) for row in await session.scalars(select(StepRun))}
    return {step: found.get(step.value) for step in StepName}


async def write_record(session: AsyncSession, step: StepName, record: StepRecord) -> None:
    """Write the step's record in place of the one before."""
    await session.execute(
        replacing_insert(session, StepRun),
        {
            "name": step.value,
            "ended_at": record.ended_at,
            "succeeded_at": record.succeeded_at,
            "seconds": record.seconds,
            "handled": record.handled,
            "position": record.position,
            "behind_since": record.behind_since,
            "failing_since": record.failing_since,
        },
    )


def _record(row: StepRun) -> StepRecord:
    return StepRecord(
        row.ended_at, row.succeeded_at, row.seconds, row.handled, row.position, row.behind_since, row.failing_since
    )
