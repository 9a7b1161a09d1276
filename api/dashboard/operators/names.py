"""Tenants by their names: lists of the admin API tell ids, and people know names."""

from collections.abc import Iterable

from api.admin.services import AdminServices
from contracts.errors import NotFound
from tenants.tenant_names import find_tenant, tenant_names


async def names_of(admin: AdminServices, tenants: Iterable[str | None]) -> dict[str, str]:
    """Return each tenant's name by its id."""
    async with admin.runtime.database.read() as session:
        return await tenant_names(session, {one for one in tenants if one is not None})


async def tenant_id_of(admin: AdminServices, asked: str | None) -> str | None:
    """Return the id of the tenant with this name, or ``asked`` itself, which may be an id; None for nothing."""
    if not asked:
        return None
    try:
        async with admin.runtime.database.read() as session:
            return await find_tenant(session, name=asked)
    except NotFound:
        return asked
