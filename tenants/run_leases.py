"""Leases of runs: which trainer may write for a run, recorded in the run's row.

Invariants: a run has at most one trainer, named by ``trainer_id``. ``lease_token`` grows whenever the trainer changes. A
trainer writes for a run only in a transaction that locks the row and finds trainer and token unchanged (``Ledger.complete``).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RunId
from store.tables import Placement, Run, RunState, Session
from tenants.placements import HAS_PENDING, MOST_RUNS, place_runs
from tenants.run_directives import lift_run_directives
from tenants.run_history import RunEventKind, note_run_events


@dataclass(frozen=True, slots=True)
class ClaimedRuns:
    """Outcome of one claim."""

    claimed: list[RunId] = field(default_factory=list)
    #: Trainers that lease some of the placed runs already. The API wrote such a placement before it knew of the lease.
    holders: list[str] = field(default_factory=list)
    #: Whether placements were left because their runs were being changed.
    has_left: bool = False


async def claim_runs(transaction: AsyncSession, trainer: str, base_model: str, most: int, now: datetime) -> ClaimedRuns:
    """Lease at most ``most`` runs to ``trainer``, those with the oldest placements first, and delete the placements.

    Placements and runs that another transaction has locked are left. A run that is just being released keeps its placement: it
    would have none once this one is deleted.
    """
    oldest = (
        select(Placement.run_id)
        .where(Placement.base_model == base_model)
        .order_by(Placement.created_at, Placement.run_id)
        .limit(most)
        .with_for_update(skip_locked=True)
    )
    placed = list(await transaction.scalars(oldest))
    if not placed:
        return ClaimedRuns()
    still = select(Run.id).where(Run.id.in_(placed)).with_for_update(key_share=True, skip_locked=True)
    runs = list(await transaction.scalars(still))
    updated = await transaction.scalars(
        update(Run)
        .where(Run.id.in_(runs), Run.trainer_id.is_(None))
        .values(trainer_id=trainer, lease_token=Run.lease_token + 1)
        .returning(Run.id)
    )
    claimed = [RunId(run_id) for run_id in updated]
    await note_run_events(transaction, claimed, RunEventKind.CLAIMED, trainer=trainer, now=now)
    await lift_run_directives(transaction, claimed, carried_out_by=trainer)
    await transaction.execute(delete(Placement).where(Placement.run_id.in_(runs)))
    holders = await transaction.scalars(
        select(Run.trainer_id).where(Run.id.in_(set(runs) - set(claimed)), Run.trainer_id.is_not(None)).distinct()
    )
    has_left = len(runs) < len(placed)
    return ClaimedRuns(claimed, [holder for holder in holders if holder is not None], has_left)


async def release_runs(transaction: AsyncSession, trainer: str, runs: Sequence[str], now: datetime) -> None:
    """End the trainer's leases on ``runs``, and place the runs that have work."""
    released = await transaction.scalars(
        update(Run)
        .where(Run.id.in_(runs), Run.trainer_id == trainer)
        .values(trainer_id=None, lease_token=Run.lease_token + 1)
        .returning(Run.id)
    )
    await note_run_events(transaction, list(released), RunEventKind.RELEASED, trainer=trainer, now=now)
    await place_runs(transaction, runs, now)


async def hand_over_run(
    transaction: AsyncSession, trainer: str, run: RunId, *, target: str, now: datetime, detail: str | None
) -> bool:
    """Pass the trainer's lease on ``run`` to the trainer ``target``; return False if the lease is not the trainer's."""
    moved = await transaction.scalar(
        update(Run)
        .where(Run.id == run, Run.trainer_id == trainer)
        .values(trainer_id=target, lease_token=Run.lease_token + 1)
        .returning(Run.id)
    )
    if moved is None:
        return False
    told = f"from {trainer}" if detail is None else f"from {trainer}: {detail}"
    await note_run_events(transaction, [run], RunEventKind.MOVED, trainer=target, now=now, detail=told[:500])
    return True


async def assign_run(transaction: AsyncSession, run: RunId, *, target: str, now: datetime, detail: str | None) -> None:
    """Lease a run that no trainer has to the trainer ``target``. A run that has been claimed meanwhile is left alone."""
    assigned = await transaction.scalar(
        update(Run)
        .where(Run.id == run, Run.trainer_id.is_(None))
        .values(trainer_id=target, lease_token=Run.lease_token + 1)
        .returning(Run.id)
    )
    if assigned is not None:
        await transaction.execute(delete(Placement).where(Placement.run_id == run))
        await note_run_events(transaction, [run], RunEventKind.MOVED, trainer=target, now=now, detail=detail)


async def release_all_runs(
    transaction: AsyncSession,
    trainer: str,
    now: datetime,
    *,
    but: Collection[str] = (),
    kind: RunEventKind = RunEventKind.RELEASED,
) -> int:
    """End the trainer's leases, except on ``but``, place the runs that have work, and return how many were released.

    ``kind`` says in the runs' history how they went: ``released``, or ``lost`` with a trainer that died.
    """
    released = await transaction.scalars(
        update(Run)
        .where(Run.trainer_id == trainer, Run.id.not_in(but))
        .values(trainer_id=None, lease_token=Run.lease_token + 1)
        .returning(Run.id)
    )
    runs = list(released)
    for first in range(0, len(runs), MOST_RUNS):
        some = runs[first : first + MOST_RUNS]
        await note_run_events(transaction, some, kind, trainer=trainer, now=now)
        await place_runs(transaction, some, now)
    return len(runs)


async def count_runs(
    session: AsyncSession, trainers: Sequence[str], *, asked_since: datetime | None = None
) -> dict[str, int]:
    """Return how many open runs each of ``trainers`` has, with ``asked_since`` those with a request since then.

    A trainer without such runs is left out.
    """
    counted = select(Run.trainer_id, func.count()).group_by(Run.trainer_id)
    counted = counted.where(Run.trainer_id.in_(trainers), Run.state.in_([RunState.CREATING, RunState.READY]))
    if asked_since is not None:
        counted = counted.where(Run.last_request_at >= asked_since)
    rows = await session.execute(counted)
    return {trainer: count for trainer, count in rows if trainer is not None}


async def runs_of_ended_sessions(session: AsyncSession, trainer: str) -> list[RunId]:
    """Return the trainer's runs whose session has ended and that have no work, at most ``MOST_RUNS``: no client can train them.

    A run with work, which its tenant's suspension holds, would be placed and claimed again.
    """
    found = await session.scalars(
        select(Run.id)
        .join(Session, Session.id == Run.session_id)
        .where(Run.trainer_id == trainer, Session.ended_at.is_not(None), ~HAS_PENDING)
        .limit(MOST_RUNS)
    )
    return [RunId(run_id) for run_id in found]


async def idle_runs(session: AsyncSession, trainer: str, *, idle_since: datetime, most: int) -> list[RunId]:
    """Return the trainer's ready runs without a request since ``idle_since``, the longest idle first."""
    found = await session.scalars(
        select(Run.id)
        .where(Run.trainer_id == trainer, Run.state == RunState.READY)
        .where(Run.last_request_at < idle_since)
        .order_by(Run.last_request_at)
        .limit(most)
    )
    return [RunId(run_id) for run_id in found]
