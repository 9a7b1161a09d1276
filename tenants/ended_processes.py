"""Processes that have died, and who took over what they held. A row is written in the transaction that reaps the process."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Integer, delete, func, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.deletions import delete_some
from store.tables import EndedProcess, Run, RunEvent, WorkerProcess
from tenants.run_history import RunEventKind

MOST_ENDED = 50
"""Dead processes that one query returns."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Runs of a dead trainer that ``trainer`` has now; None: those that no trainer has."""

    trainer: str | None
    runs: int


@dataclass(frozen=True, slots=True)
class EndedStanding:
    """A process that died, found dead at ``ended_at``, with the ``runs`` and ``samples`` that it held."""

    id: str
    kind: str
    base_model: str
    host: str
    pid: int
    release: str | None
    started_at: datetime
    ended_at: datetime
    runs: int
    samples: int
    taken_over: Sequence[TakeOver]


async def note_ended(
    transaction: AsyncSession, processes: Collection[str], *, now: datetime, runs: int = 0, samples: int = 0
) -> None:
    """Record that the processes have died, each with so many runs and samples in its hands. Their rows must be there still."""
    # A process that was thawed after its end was noted may die again.
    await transaction.execute(delete(EndedProcess).where(EndedProcess.id.in_(processes)))
    copied = ("id", "kind", "base_model", "host", "pid", "release", "started_at", "drained_at", "drain_reason")
    found = select(
        *(getattr(WorkerProcess, name) for name in copied),
        literal(now, EndedProcess.ended_at.type),
        literal(runs, Integer),
        literal(samples, Integer),
    ).where(WorkerProcess.id.in_(processes))
    await transaction.execute(insert(EndedProcess).from_select([*copied, "ended_at", "runs", "samples"], found))


async def list_ended(session: AsyncSession, *, since: datetime) -> list[EndedStanding]:
    """Return the processes that died after ``since``, the latest first, at most ``MOST_ENDED``."""
    newest = select(EndedProcess).where(EndedProcess.ended_at > since)
    newest = newest.order_by(EndedProcess.ended_at.desc(), EndedProcess.id).limit(MOST_ENDED)
    rows = list(await session.scalars(newest))
    taken = await _taken_over(session, [row.id for row in rows if row.runs], since)
    return [
        EndedStanding(
            id=row.id,
            kind=row.kind,
            base_model=row.base_model,
            host=row.host,
            pid=row.pid,
            release=row.release,
            started_at=row.started_at,
            ended_at=row.ended_at,
            runs=row.runs,
            samples=row.samples,
            taken_over=taken.get(row.id, ()),
        )
        for row in rows
    ]


async def _taken_over(
    session: AsyncSession, trainers: Collection[str], since: datetime
) -> Mapping[str, Sequence[TakeOver]]:
    """Return of each dead trainer which trainers have the runs now that it lost."""
    if not trainers:
        return {}
    rows = await session.execute(
        select(RunEvent.trainer, Run.trainer_id, func.count())
        .join(Run, Run.id == RunEvent.run_id)
        .where(RunEvent.at > since, RunEvent.kind == RunEventKind.LOST, RunEvent.trainer.in_(trainers))
        .group_by(RunEvent.trainer, Run.trainer_id)
        .order_by(func.count().desc())
    )
    found: defaultdict[str, list[TakeOver]] = defaultdict(list)
    for dead, now_at, runs in rows:
        found[dead or ""].append(TakeOver(now_at, runs))
    return found


async def delete_ended_processes(transaction: AsyncSession, *, before: datetime, most: int) -> int:
    """Delete at most ``most`` processes that died before ``before``; return how many."""
    old = EndedProcess.ended_at < before
    return await delete_some(transaction, EndedProcess, old, most=most, first=EndedProcess.ended_at)
