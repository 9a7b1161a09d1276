"""Names of tenants: creates a tenant under a name, and finds tenants and their names."""

from collections.abc import Collection
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound
from contracts.ids import TenantId
from store.clock import Clock
from store.inserts import insert_unless_present
from store.tables import Tenant


async def create_tenant(transaction: AsyncSession, *, name: str, clock: Clock) -> TenantId:
    """Create a tenant. Raises ``InvalidRequest`` when the name is empty, too long or taken."""
    if not 0 < len(name) <= 100:
        raise InvalidRequest("tenant name must have 1 to 100 characters")
    row = insert_unless_present(transaction, Tenant).values(id=uuid4().hex, name=name, share=1.0, created_at=clock())
    made = (await transaction.execute(row.returning(Tenant.id))).scalar_one_or_none()
    if made is None:
        raise InvalidRequest(f"a tenant named {name!r} exists already; choose another name")
    return TenantId(made)


async def find_tenant(session: AsyncSession, *, name: str) -> TenantId:
    """Return the tenant of that name. Raises ``NotFound``."""
    found = await session.scalar(select(Tenant.id).where(Tenant.name == name))
    if found is None:
        raise NotFound(f"no tenant is named {name!r}; `weft tenant list` shows them")
    return TenantId(found)


async def tenant_name(session: AsyncSession, tenant: TenantId) -> str:
    """Return the tenant's name."""
    return (await session.scalars(select(Tenant.name).where(Tenant.id == tenant))).one()


async def tenant_names(session: AsyncSession, tenants: Collection[str]) -> dict[str, str]:
    """Return the names of the tenants by their ids."""
    rows = await session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(sorted(tenants))))
    return {row.id: row.name for row in rows}


async def list_tenants(session: AsyncSession) -> list[Tenant]:
    """Return every tenant, oldest first."""
    return list(await session.scalars(select(Tenant).order_by(Tenant.created_at)))
