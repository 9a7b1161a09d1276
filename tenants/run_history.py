"""The history of runs: rows that tell which trainer had a run, how it came and how it went.

A row is written in the transaction that it is about, so the history and the leases never disagree.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import cast

from sqlalchemy import Table, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.deletions import delete_some
from store.tables import Run, RunEvent

MOST_EVENTS = 256
"""Events of a run that one query returns."""
_events = cast(Table, RunEvent.__table__)


class RunEventKind(StrEnum):
    """Kind of an event.

    - ``claimed``: a trainer got the run. ``released``: it gave the run up in order.
    - ``lost``: the run was taken from a trainer that died.
    - ``moved``: an operator had the run handed to another trainer.
    - ``restored``: the adapter was rebuilt from a snapshot. ``replayed``: with operations after it.
    - ``evicted``: an operator had the adapter paged out.
    """

    CLAIMED = "claimed"
    RELEASED = "released"
    LOST = "lost"
    MOVED = "moved"
    RESTORED = "restored"
    REPLAYED = "replayed"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class PastEvent:
    """One event of a run's history."""

    id: int
    kind: RunEventKind
    trainer: str | None
    lease_token: int
    detail: str | None
    at: datetime


async def note_run_events(
    transaction: AsyncSession,
    runs: Collection[str],
    kind: RunEventKind,
    *,
    trainer: str | None,
    now: datetime,
    detail: str | None = None,
) -> None:
    """Add one event to the history of each of ``runs``; the fencing token is the one that the run has by now."""
    if not runs:
        return
    columns = ("run_id", "tenant_id", "kind", "trainer", "lease_token", "detail", "at")
    happened = select(
        Run.id,
        Run.tenant_id,
        literal(kind.value),
        literal(trainer, _events.c.trainer.type),
        Run.lease_token,
        literal(detail, _events.c.detail.type),
        literal(now, _events.c.at.type),
    ).where(Run.id.in_(runs))
    await transaction.execute(insert(_events).from_select(columns, happened.order_by(Run.id)))


async def run_history(session: AsyncSession, run: str, *, most: int = MOST_EVENTS) -> list[PastEvent]:
    """Return the newest ``most`` events of the run, the newest first; none of a kind that only another version knows."""
    of_run = select(RunEvent).where(RunEvent.run_id == run, RunEvent.kind.in_([*RunEventKind]))
    rows = await session.scalars(of_run.order_by(RunEvent.id.desc()).limit(min(most, MOST_EVENTS)))
    return [PastEvent(row.id, RunEventKind(row.kind), row.trainer, row.lease_token, row.detail, row.at) for row in rows]


async def was_restored(session: AsyncSession, run: str, lease_token: int) -> bool:
    """Return whether the history has a restore of the run under this fencing token already."""
    kinds = [RunEventKind.RESTORED, RunEventKind.REPLAYED]
    which = (RunEvent.run_id == run, RunEvent.lease_token == lease_token, RunEvent.kind.in_(kinds))
    return await session.scalar(select(RunEvent.id).where(*which).limit(1)) is not None


async def delete_run_events(transaction: AsyncSession, *, before: datetime, most: int) -> int:
    """Delete at most ``most`` events older than ``before``; return how many."""
    return await delete_some(transaction, RunEvent, RunEvent.at < before, most=most, first=RunEvent.at)
