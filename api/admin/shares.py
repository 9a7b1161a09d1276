"""Tenants' shares for operators: what each was served against what it is entitled to, and what it has pending and stored."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.bodies import After, Limit, Listed
from api.admin.overview import TenantLoad, busy_tenants, tenant_loads
from api.admin.services import Admin, AdminServices, Caller
from api.admin.tenants import TenantBody, tenant_body
from contracts.ids import TenantId
from ledger.tenant_load import QueuePart, read_queue_parts, served_tokens
from store.tables import Tenant
from tenants.limit_use import STORAGE_USE
from tenants.pages import page_of
from tenants.usage import usage

router = APIRouter(tags=["tenants"])

WINDOWS = (300, 3600)
"""Seconds over which served tokens are told."""


class ServedWindow(BaseModel):
    """A tenant's part of what was served in the last ``seconds``, and the part that it was entitled to.

    ``tokens``: of its operations that have ended in that time, and are not pruned yet.
    """

    seconds: int
    tokens: int
    served_share: float
    entitled_share: float


class TenantShares(TenantBody):
    """A tenant with its load. ``tokens_today``: of what has ended today (UTC)."""

    pending: int
    pending_tokens: int
    oldest_seconds: float
    served: list[ServedWindow]
    stored_bytes: int
    checkpoints: int
    tokens_today: int


@router.get("/shares")
async def list_shares(caller: Caller, admin: Admin, after: After = None, limit: Limit = 50) -> Listed[TenantShares]:
    """List tenants: what each was served in the last 5 minutes and the last hour, against what it was entitled to.

    Entitled to: its share times its class's factor, among the tenants that had work in that time and are not suspended.
    """
    del caller
    now = await admin.now()
    async with admin.runtime.database.survey() as session:
        rows = await page_of(session, Tenant, after=after, most=limit + 1)
        parts = await read_queue_parts(session)
        windows = [await _loads(session, parts, now, seconds) for seconds in WINDOWS]
        items = await _items(session, admin, rows[:limit], windows, now)
    return Listed(items=items, next=rows[limit - 1].id if len(rows) > limit else None)


async def _loads(
    session: AsyncSession, parts: Sequence[QueuePart], now: datetime, seconds: int
) -> dict[str, TenantLoad]:
    served = await served_tokens(session, since=now - timedelta(seconds=seconds))
    busy = await busy_tenants(session, {part.tenant_id for part in parts} | served.keys())
    return {load.id: load for load in tenant_loads(busy, parts, served, now, seconds)}


async def _items(
    session: AsyncSession,
    admin: AdminServices,
    rows: Sequence[Tenant],
    windows: Sequence[dict[str, TenantLoad]],
    now: datetime,
) -> list[TenantShares]:
    stored = await STORAGE_USE.read(session, [TenantId(row.id) for row in rows], admin.limits)
    today: dict[str, int] = {}
    for line in await usage(session, since=now.date()):
        today[line.tenant] = today.get(line.tenant, 0) + line.tokens
    items = []
    for row in rows:
        load, used = windows[0].get(row.id), stored[TenantId(row.id)].used
        items.append(
            TenantShares(
                **tenant_body(row).model_dump(),
                pending=0 if load is None else load.pending,
                pending_tokens=0 if load is None else load.pending_tokens,
                oldest_seconds=0.0 if load is None else load.oldest_seconds,
                served=[_window(seconds, loads.get(row.id)) for seconds, loads in zip(WINDOWS, windows, strict=True)],
                stored_bytes=used["stored_bytes"],
                checkpoints=used["checkpoints"],
                tokens_today=today.get(row.name, 0),
            )
        )
    return items


def _window(seconds: int, load: TenantLoad | None) -> ServedWindow:
    if load is None:
        return ServedWindow(seconds=seconds, tokens=0, served_share=0.0, entitled_share=0.0)
    return ServedWindow(
        seconds=seconds,
        tokens=load.served_tokens,
        served_share=load.served_share,
        entitled_share=load.entitled_share,
    )
