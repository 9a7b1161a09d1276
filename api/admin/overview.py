"""The service at one glance, for ``weft top``: tenants with their load, the queue, trainers, pools and replicas."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.processes import ApiBody, PoolBody, TrainerBody, api_body, pool_body, trainer_body
from api.admin.queue import QueueLine, queue_lines
from api.admin.replicas import ReplicaBody, replica_body
from api.admin.services import Admin, Caller
from contracts.service_class import FACTORS, known_class
from ledger.tenant_load import QueuePart, read_queue_parts, served_tokens
from store.tables import Tenant
from tenants.rights import SuspendMode, known_mode
from tenants.trainers import list_trainers
from tenants.worker_standings import list_apis, list_pools, list_replicas

router = APIRouter(tags=["overview"])


class TenantLoad(BaseModel):
    """A tenant that has work, or had some in the window.

    - ``served_share``: its part of all tokens served in the window.
    - ``entitled_share``: its part by weight, of the tenants in the list that are not suspended.
    """

    id: str
    name: str
    share: float
    suspension: SuspendMode | None
    pending: int
    pending_tokens: int
    oldest_seconds: float
    served_tokens: int
    tokens_per_second: float
    served_share: float
    entitled_share: float


class Overview(BaseModel):
    """The service now, by the database's clock. ``tenants``: the busiest first."""

    at: datetime
    window_seconds: int
    tenants: list[TenantLoad]
    queue: list[QueueLine]
    trainers: list[TrainerBody]
    pools: list[PoolBody]
    apis: list[ApiBody]
    replicas: list[ReplicaBody]


@router.get("/overview")
async def show_overview(
    caller: Caller, admin: Admin, window_seconds: Annotated[int, Query(ge=1, le=3600)] = 60
) -> Overview:
    """Show the service at one glance. Tokens are those of operations that have ended in the last ``window_seconds``."""
    del caller
    now = await admin.now()
    async with admin.runtime.database.survey() as session:
        parts = await read_queue_parts(session)
        served = await served_tokens(session, since=now - timedelta(seconds=window_seconds))
        # One that only made a model, say, had no tokens to be due.
        working = {part.tenant_id for part in parts} | {tenant for tenant, tokens in served.items() if tokens}
        rows = await busy_tenants(session, working)
        trainers = await list_trainers(session, admin.runtime.clock)
        pools, apis = await list_pools(session), await list_apis(session)
        replicas = await list_replicas(session, None, now)
    return Overview(
        at=now,
        window_seconds=window_seconds,
        tenants=tenant_loads(rows, parts, served, now, window_seconds),
        queue=queue_lines(parts, {row.id: row.name for row in rows}, now),
        trainers=[trainer_body(one, now) for one in trainers],
        pools=[pool_body(one, now) for one in pools],
        apis=[api_body(one, now) for one in apis],
        replicas=[replica_body(one) for one in replicas],
    )


def tenant_loads(
    rows: Sequence[Tenant], parts: Sequence[QueuePart], served: Mapping[str, int], now: datetime, seconds: int
) -> list[TenantLoad]:
    """Return each tenant's load, the busiest first."""
    of_tenant: defaultdict[str, list[QueuePart]] = defaultdict(list)
    for part in parts:
        of_tenant[part.tenant_id].append(part)
    weights = {row.id: row.share * FACTORS[known_class(row.service_class)] for row in rows if row.suspended_at is None}
    all_served, all_weights = sum(served.values()) or 1, sum(weights.values()) or 1.0
    loads = []
    for row in rows:
        own, tokens = of_tenant[row.id], served.get(row.id, 0)
        mode = None if row.suspended_at is None else known_mode(row.suspend_mode)
        loads.append(
            TenantLoad(
                id=row.id,
                name=row.name,
                share=row.share,
                suspension=mode,
                pending=sum(part.pending for part in own),
                pending_tokens=sum(part.tokens for part in own),
                oldest_seconds=max([0.0, *((now - part.oldest).total_seconds() for part in own)]),
                served_tokens=tokens,
                tokens_per_second=tokens / seconds,
                served_share=tokens / all_served,
                entitled_share=weights.get(row.id, 0.0) / all_weights,
            )
        )
    return sorted(loads, key=lambda load: (-load.served_tokens, -load.pending, load.name))


async def busy_tenants(session: AsyncSession, ids: set[str]) -> list[Tenant]:
    """Return the tenants with these ids, and every suspended one."""
    wanted = or_(Tenant.id.in_(sorted(ids)), Tenant.suspended_at.is_not(None))
    return list(await session.scalars(select(Tenant).where(wanted)))
