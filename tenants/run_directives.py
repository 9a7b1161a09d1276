"""Run directives: rows by which an operator has a run's adapter paged out, or the run handed to another trainer.

The run's trainer reads them, carries them out in order and deletes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import RunId
from store.deletions import delete_some
from store.tables import DirectedRun, Run
from tenants.placements import MOST_RUNS


class RunDirective(StrEnum):
    """Directive of an operator for a run: ``move`` it to another trainer, or ``evict`` its adapter to disk."""

    MOVE = "move"
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class StandingRunDirective:
    """A directive that is not carried out yet. ``target``: trainer that is to get a moved run, if one was named."""

    run: RunId
    directive: RunDirective
    target: str | None
    reason: str | None


async def direct_run(
    transaction: AsyncSession,
    run_id: str,
    directive: RunDirective,
    *,
    target: str | None = None,
    reason: str | None = None,
    now: datetime,
) -> None:
    """Set the run's directive, replacing an earlier one. Raises ``NotFound``."""
    run = await transaction.get(Run, run_id)
    if run is None:
        raise NotFound(f"no run {run_id[:150]!r}; `weft operation list` shows runs with work")
    await lift_run_directives(transaction, [run_id])
    transaction.add(
        DirectedRun(run_id=run.id, tenant_id=run.tenant_id, wanted=directive, target=target, reason=reason, since=now)
    )
    await transaction.flush()


async def lift_run_directives(
    transaction: AsyncSession, runs: Sequence[str], *, carried_out_by: str | None = None
) -> None:
    """Delete the runs' directives; with ``carried_out_by`` not those that name another trainer than this one."""
    if not runs:
        return
    lifted = delete(DirectedRun).where(DirectedRun.run_id.in_(runs))
    if carried_out_by is not None:
        lifted = lifted.where(or_(DirectedRun.target.is_(None), DirectedRun.target == carried_out_by))
    await transaction.execute(lifted)


async def delete_stale_directives(transaction: AsyncSession, *, before: datetime, most: int) -> int:
    """Delete at most ``most`` directives set before ``before``, which nobody will carry out; return how many."""
    return await delete_some(transaction, DirectedRun, DirectedRun.since < before, most=most)


async def directives_for(session: AsyncSession, trainer: str) -> list[StandingRunDirective]:
    """Return directives for runs that ``trainer`` leases, at most ``MOST_RUNS``; none that only another version knows."""
    rows = await session.scalars(
        select(DirectedRun)
        .join(Run, Run.id == DirectedRun.run_id)
        .where(Run.trainer_id == trainer, DirectedRun.wanted.in_([*RunDirective]))
        .order_by(DirectedRun.since)
        .limit(MOST_RUNS)
    )
    return [StandingRunDirective(RunId(row.run_id), RunDirective(row.wanted), row.target, row.reason) for row in rows]


async def standing_directive(session: AsyncSession, run_id: str) -> StandingRunDirective | None:
    """Return the run's directive, None if it has none, or one that only another version knows."""
    row = await session.get(DirectedRun, run_id)
    if row is None or row.wanted not in [*RunDirective]:
        return None
    return StandingRunDirective(RunId(row.run_id), RunDirective(row.wanted), row.target, row.reason)
