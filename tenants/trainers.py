"""Trainers as operators see them: listed, found by the beginning of an id, drained and set to work again."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from store.clock import Clock
from store.database_clock import database_now
from store.tables import ProcessKind, Run, RunEvent, WorkerProcess
from tenants.run_history import RunEventKind

RECORDS = "in-hand"
"""Folder of the trainers' records of their work in hand, relative to the data folder: a folder for each, by its id."""
REPLAY_WINDOW = timedelta(hours=1)
"""Time in which replays are counted."""


@dataclass(frozen=True, slots=True)
class LastPass:
    """Figures of a trainer's last pass, which ended at ``ended_at``, by the database's clock. ``tokens`` leaves padding out."""

    ended_at: datetime
    seconds: float
    tokens: int
    padding_share: float
    """Share of padding among all computed positions, 0 to 1."""
    sequences: int
    adapters: int
    tenants: int


@dataclass(frozen=True, slots=True)
class TrainerStanding:
    """State of one trainer. ``drained_at``: since when it is drained, with the operator's ``reason``.

    ``expires_at``: end of its lease, by the database's clock.
    """

    id: str
    base_model: str
    host: str
    pid: int
    started_at: datetime
    expires_at: datetime
    is_alive: bool
    drained_at: datetime | None
    reason: str | None
    runs: int
    """Runs that the trainer leases."""
    residents: int | None
    """Runs whose adapters are in its memory; None until it has told."""
    replays: int
    """Adapters that it rebuilt by computing operations again, in ``REPLAY_WINDOW``."""
    last_pass: LastPass | None
    """None until it has told of one."""
    release: str | None
    """Version of weft that it runs."""


async def list_trainers(session: AsyncSession, clock: Clock) -> list[TrainerStanding]:
    """Return every recorded trainer, by base model and time of its start."""
    now = await database_now(session, clock)
    leased = select(func.count()).select_from(Run).where(Run.trainer_id == WorkerProcess.id).scalar_subquery()
    replayed = (
        select(func.count())
        .select_from(RunEvent)
        .where(
            RunEvent.at > now - REPLAY_WINDOW,
            RunEvent.kind == RunEventKind.REPLAYED,
            RunEvent.trainer == WorkerProcess.id,
        )
        .scalar_subquery()
    )
    rows = await session.execute(
        select(WorkerProcess, leased, replayed)
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
            expires_at=row.expires_at,
            is_alive=row.expires_at > now,
            drained_at=row.drained_at,
            reason=row.drain_reason,
            runs=runs,
            residents=None if row.resident_runs is None else len(row.resident_runs),
            replays=replays,
            last_pass=_last_pass(row),
            release=row.release,
        )
        for row, runs, replays in rows
    ]


def _last_pass(row: WorkerProcess) -> LastPass | None:
    if row.pass_ended_at is None:
        return None
    positions, tokens = row.pass_positions or 0, row.pass_tokens or 0
    return LastPass(
        ended_at=row.pass_ended_at,
        seconds=row.pass_seconds or 0.0,
        tokens=tokens,
        padding_share=(positions - tokens) / positions if positions else 0.0,
        sequences=row.pass_sequences or 0,
        adapters=row.pass_adapters or 0,
        tenants=row.pass_tenants or 0,
    )


async def resident_runs(session: AsyncSession, trainers: Collection[str]) -> frozenset[tuple[str, str]]:
    """Return each of the trainers with each run whose adapter is in its memory."""
    rows = await session.execute(
        select(WorkerProcess.id, WorkerProcess.resident_runs).where(WorkerProcess.id.in_(sorted(trainers)))
    )
    return frozenset((row.id, run) for row in rows for run in row.resident_runs or ())


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
