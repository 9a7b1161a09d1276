"""Drains of trainers: an operator has a trainer give up its runs in order and get no new ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from store.clock import Clock
from store.tables import Run, WorkerProcess
from workers.leases.processes import ProcessKind, database_now


@dataclass(frozen=True, slots=True)
class TrainerStanding:
    """State of one trainer. ``drained_at``: since when it is drained, with the operator's ``reason``."""

    id: str
    base_model: str
    host: str
    pid: int
    started_at: datetime
    is_alive: bool
    drained_at: datetime | None
    reason: str | None
    runs: int
    """Runs that the trainer leases."""


async def list_trainers(session: AsyncSession, clock: Clock) -> list[TrainerStanding]:
    """Return every recorded trainer, by base model and time of its start."""
    now = await database_now(session, clock)
    leased = select(func.count()).select_from(Run).where(Run.trainer_id == WorkerProcess.id).scalar_subquery()
    rows = await session.execute(
        select(WorkerProcess, leased)
        .where(WorkerProcess.kind == ProcessKind.TRAINER)
        .order_by(WorkerProcess.base_model, WorkerProcess.started_at, WorkerProcess.id)
    )
    return [
        TrainerStanding(
            id=row.id,
            base_model=row.base_model,
            host=row.host,
            pid=row.pid,
            started_at=row.started_at,
            is_alive=row.expires_at > now,
            drained_at=row.drained_at,
            reason=row.drain_reason,
            runs=runs,
        )
        for row, runs in rows
    ]


async def find_trainer(session: AsyncSession, trainer: str, clock: Clock) -> TrainerStanding:
    """Return the trainer with this id, or the only one whose id begins with it. Raises ``NotFound``."""
    found: Sequence[TrainerStanding] = [
        one for one in await list_trainers(session, clock) if one.id.startswith(trainer) and trainer
    ]
    if len(found) != 1:
        count = "no trainer's id begins" if not found else f"{len(found)} trainers' ids begin"
        raise NotFound(f"{count} with {trainer[:64]!r}; `weft trainer list` shows them")
    return found[0]


async def drain_trainer(transaction: AsyncSession, trainer: str, *, reason: str | None, now: datetime) -> None:
    """Have the trainer give up its runs and take none."""
    await _set(transaction, trainer, drained_at=now, drain_reason=reason)


async def undrain_trainer(transaction: AsyncSession, trainer: str) -> None:
    """Have the trainer take runs again. A trainer that is not drained is left alone."""
    await _set(transaction, trainer, drained_at=None, drain_reason=None)


async def _set(transaction: AsyncSession, trainer: str, **values: object) -> None:
    await transaction.execute(update(WorkerProcess).where(WorkerProcess.id == trainer).values(**values))
