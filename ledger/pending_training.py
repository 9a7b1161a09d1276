"""Reads the pending operations that a trainer has to know, without their payloads."""

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RunId
from contracts.ledger_records import PendingOperation
from ledger import statements as sql
from ledger.rows import pending_operation, starts_at
from store.batcher import few_lengths
from tenants.budgets import budget_keys


async def pending_after(
    session: AsyncSession,
    base_model: str,
    trainer: str,
    position: int,
    *,
    now: datetime,
    known: Collection[int] = (),
    runs: Collection[RunId] | None = None,
) -> list[PendingOperation]:
    """Return operations after ``position`` of the runs that ``trainer`` leases, oldest first: of ``runs`` alone, if given.

    At most ``MAX_PENDING``. Operations at ``known`` positions may be left out. One may run once its seq_id is its run's
    ``next_seq_id``.
    """
    keys: dict[str, Any] = {"base_model": base_model, "trainer": trainer, "after_position": position}
    keys |= budget_keys(now)
    dialect = session.get_bind().dialect.name
    if runs is not None:
        statement, keys["lanes"] = sql.PENDING_OF_RUNS, few_lengths(sorted(runs))
    else:
        statement = sql.PENDING_TRAINING[dialect]
        if dialect != "sqlite":
            keys["known"] = list(known)
    rows = (await session.execute(statement, keys)).all()
    return [pending_operation(row, trainer, starts_at=starts_at(row, now)) for row in rows]
