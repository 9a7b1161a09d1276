"""Placements: the table of runs that have pending operations and no trainer.

A placement is a row. It is written with the operation that finds its run without a trainer, and deleted when a trainer
claims the run. A cluster announces placements to trainers, so the table is an outbox as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ledger_records import OperationState
from store.inserts import insert_unless_present
from store.pending_operations import IS_PENDING, IS_TRAINING
from store.tables import Operation, Placement, Run

MOST_RUNS = 256
"""Runs or placements that one statement handles at most."""
# All before ``next_seq_id`` is final: naming it spares a read of the whole lane.
# Counted: PostgreSQL would join what does not exist with the whole ledger.
HAS_PENDING = (
    select(func.count())
    .where(Operation.lane == Run.id, Operation.seq_id >= Run.next_seq_id, Operation.state == OperationState.PENDING)
    .scalar_subquery()
) > 0
"""Condition that operations of a run are pending."""


@dataclass(frozen=True, slots=True)
class DuePlacement:
    """A placement that is to be announced."""

    run_id: str
    base_model: str


async def place_runs(transaction: AsyncSession, runs: Sequence[str], now: datetime) -> None:
    """Insert a placement for each of ``runs`` that has pending operations and no trainer."""
    has_work = exists().where(Operation.lane == Run.id, Operation.state == OperationState.PENDING)
    found = await transaction.execute(
        select(Run.id, Run.tenant_id, Run.base_model).where(Run.id.in_(runs), Run.trainer_id.is_(None), has_work)
    )
    rows = [
        {"run_id": row.id, "tenant_id": row.tenant_id, "base_model": row.base_model, "created_at": now} for row in found
    ]
    if rows:
        await transaction.execute(insert_unless_present(transaction, Placement).values(rows))


async def unplaced_runs(session: AsyncSession, base_model: str) -> list[str]:
    """Return runs with pending operations that have neither a trainer nor a placement, at most ``MOST_RUNS``."""
    found = await session.scalars(
        select(Operation.lane)
        .join(Run, Run.id == Operation.lane)
        .where(
            IS_PENDING,
            IS_TRAINING,
            Operation.base_model == base_model,
            Run.trainer_id.is_(None),
            ~exists().where(Placement.run_id == Run.id),
        )
        .distinct()
        .limit(MOST_RUNS)
    )
    return list(found)


async def count_placements(session: AsyncSession, base_model: str) -> int:
    """Return how many runs of the base model wait for a trainer."""
    query = select(func.count()).select_from(Placement).where(Placement.base_model == base_model)
    return await session.scalar(query) or 0


async def due_placements(session: AsyncSession, *, announced_before: datetime) -> list[DuePlacement]:
    """Return placements that were never announced, or last before the given time; at most ``MOST_RUNS``.

    Base models take turns, so that very many placements of one hide no other's. Within each, the placements never announced
    come first, then those announced longest ago.
    """
    due = or_(Placement.announced_at.is_(None), Placement.announced_at < announced_before)
    order = (Placement.announced_at.asc().nulls_first(), Placement.created_at, Placement.run_id)
    turn = func.row_number().over(partition_by=Placement.base_model, order_by=order).label("turn")
    turns = select(Placement.run_id, Placement.base_model, turn).where(due).subquery()
    rows = await session.execute(select(turns).order_by(turns.c.turn, turns.c.base_model).limit(MOST_RUNS))
    return [DuePlacement(row.run_id, row.base_model) for row in rows]


async def mark_announced(transaction: AsyncSession, runs: Sequence[str], now: datetime) -> None:
    """Record that the placements of ``runs`` were announced."""
    await transaction.execute(
        update(Placement)
        .where(Placement.run_id.in_(runs))
        .values(announced_at=now)
        .execution_options(synchronize_session=False)
    )
