"""Turns of runs: the lock on runs whose operations end, and the advance past operations that are final."""

from collections.abc import Collection, Mapping
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from ledger import statements as sql


async def lock_runs(transaction: AsyncSession, runs: Collection[str]) -> None:
    """Lock the runs' rows: two transactions that finish neighbouring operations must not both read one ``next_seq_id``."""
    # SQLite has one writer anyway.
    if runs and transaction.get_bind().dialect.name != "sqlite":
        await transaction.execute(sql.LOCK_RUNS, {"lanes": sorted(runs)})


async def advance(
    transaction: AsyncSession, runs: Collection[str], now: datetime, steps: Mapping[str, int] | None = None
) -> None:
    """Move each run's ``next_seq_id`` past the final operations that follow it without a gap; count new optimizer ``steps``."""
    if not runs:
        return
    taken = steps or {}
    lanes = [{"lane": lane, "now": now, "steps": taken.get(lane, 0)} for lane in sorted(runs)]
    await transaction.execute(sql.ADVANCE, lanes)
