"""Heads of runs: how far each of many runs has come and what else of it has changed, in one statement, for those who watch."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.batcher import few_lengths
from store.tables import AuditEntry, Checkpoint, Run, RunEvent, Session
from store.tables.audit import IS_OF_SAMPLING

_HEADS = (
    select(
        Run.id,
        Run.tenant_id,
        Run.optimizer_steps,
        Run.next_seq_id,
        Run.state,
        Run.lease_token,
        Session.ended_at,
        select(func.max(RunEvent.id)).where(RunEvent.run_id == Run.id).scalar_subquery().label("event"),
        select(func.max(Checkpoint.created_at)).where(Checkpoint.run_id == Run.id).scalar_subquery().label("saved_at"),
        select(func.max(AuditEntry.id))
        .where(AuditEntry.resource_id == Run.id, IS_OF_SAMPLING)
        .scalar_subquery()
        .label("gated"),
    )
    .join(Session, Session.id == Run.session_id)
    .where(Run.id.in_(bindparam("runs", expanding=True)))
)


@dataclass(frozen=True, slots=True)
class RunHead:
    """Place of a run. ``work`` differs after a step or a request, ``marks`` after what makes a mark on the curve."""

    tenant: TenantId
    optimizer_steps: int
    work: tuple[int, int, str]
    marks: tuple[int, datetime | None, int | None, datetime | None, int | None]


async def run_heads(session: AsyncSession, runs: Sequence[str]) -> dict[str, RunHead]:
    """Return the heads of those runs that there are. The caller knows whose they are."""
    rows = await session.execute(_HEADS, {"runs": few_lengths(sorted(set(runs)))})
    return {row.id: _head(row) for row in rows}


def _head(row: Any) -> RunHead:
    return RunHead(
        tenant=TenantId(row.tenant_id),
        optimizer_steps=row.optimizer_steps,
        work=(row.optimizer_steps, row.next_seq_id, row.state),
        marks=(row.lease_token, row.ended_at, row.event, row.saved_at, row.gated),
    )
