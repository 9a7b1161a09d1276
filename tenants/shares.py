"""Weights of tenants where work is shared out: a tenant's share times its class's factor."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Float, case, cast, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RunId, TenantId
from contracts.service_class import FACTORS, ServiceClass
from store.tables import Run, Tenant


@dataclass(frozen=True, slots=True)
class WeighedTenant:
    """A tenant and its weight."""

    id: TenantId
    share: float


def weight(tenant: Any) -> ColumnElement[float]:
    """Return the weight as a column named ``share``; ``tenant`` has the columns of ``tenants``."""
    factors = [
        (tenant.service_class == service_class.value, literal(factor, Float))
        for service_class, factor in FACTORS.items()
        if service_class is not ServiceClass.STANDARD
    ]
    # A class that only a newer version knows counts as standard.
    standard = literal(FACTORS[ServiceClass.STANDARD], Float)
    return cast(tenant.share * case(*factors, else_=standard), Float).label("share")


async def owner_of_run(session: AsyncSession, run: RunId) -> WeighedTenant | None:
    """Return the tenant of a run, None for a run that is gone."""
    query = select(Tenant.id, weight(Tenant)).join(Run, Run.tenant_id == Tenant.id).where(Run.id == run)
    row = (await session.execute(query)).one_or_none()
    return None if row is None else WeighedTenant(TenantId(row.id), row.share)
