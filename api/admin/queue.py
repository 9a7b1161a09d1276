"""The queue for operators: what waits of each base model and kind, who fills it, and runs that wait for a trainer."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.bodies import After, Limit, Listed, QueryText, listed
from api.admin.services import Admin, Caller
from ledger.tenant_load import QueuePart, read_queue_parts
from store.tables import Placement, Tenant
from tenants.pages import page_of

router = APIRouter(tags=["queue"])

_FILLERS = 5
"""Tenants that a line of the queue names: those with the most operations."""


class Filler(BaseModel):
    """A tenant's part of a line of the queue."""

    tenant: str
    pending: int
    tokens: int


class QueueLine(BaseModel):
    """Pending operations of one base model and kind. ``tokens``: of training data, or what samples may take at most."""

    base_model: str
    kind: str
    pending: int
    tokens: int
    oldest_seconds: float
    tenants: int
    filled_by: list[Filler]


class PlacementBody(BaseModel):
    """A run with work that waits for a trainer."""

    run_id: str
    tenant_id: str
    base_model: str
    created_at: datetime
    announced_at: datetime | None


@router.get("/queue")
async def show_queue(caller: Caller, admin: Admin) -> Listed[QueueLine]:
    """List what is pending by base model and kind, and the tenants that fill each line; all in one page."""
    del caller
    now = await admin.now()
    async with admin.runtime.database.survey() as session:
        parts = await read_queue_parts(session)
        names = await tenant_names(session, {part.tenant_id for part in parts})
    return Listed(items=queue_lines(parts, names, now))


@router.get("/placements")
async def list_placements(
    caller: Caller, admin: Admin, base_model: QueryText = None, after: After = None, limit: Limit = 50
) -> Listed[PlacementBody]:
    """List runs that have work and no trainer."""
    del caller
    conditions = [] if base_model is None else [Placement.base_model == base_model]
    async with admin.runtime.database.survey() as session:
        rows = await page_of(session, Placement, *conditions, after=after, most=limit + 1)
    bodies = [PlacementBody.model_validate(row, from_attributes=True) for row in rows]
    return listed(bodies, limit, [row.run_id for row in rows])


async def tenant_names(session: AsyncSession, ids: set[str]) -> dict[str, str]:
    """Return the names of the tenants."""
    rows = await session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(sorted(ids))))
    return {row.id: row.name for row in rows}


def queue_lines(parts: Sequence[QueuePart], names: Mapping[str, str], now: datetime) -> list[QueueLine]:
    """Return the queue's lines, by base model and kind."""
    found: defaultdict[tuple[str, str], list[QueuePart]] = defaultdict(list)
    for part in parts:
        found[part.base_model, part.kind].append(part)
    lines = []
    for (base_model, kind), some in sorted(found.items()):
        most = sorted(some, key=lambda part: (-part.pending, part.tenant_id))[:_FILLERS]
        lines.append(
            QueueLine(
                base_model=base_model,
                kind=kind,
                pending=sum(part.pending for part in some),
                tokens=sum(part.tokens for part in some),
                oldest_seconds=max(0.0, (now - min(part.oldest for part in some)).total_seconds()),
                tenants=len(some),
                filled_by=[
                    Filler(tenant=names.get(part.tenant_id, "?"), pending=part.pending, tokens=part.tokens)
                    for part in most
                ],
            )
        )
    return lines
