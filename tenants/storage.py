"""Room of a tenant for stored bytes: its checkpoints and its training snapshots."""

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import StorageFull
from contracts.ids import TenantId
from tenants.limit_use import STORAGE_USE, Use
from tenants.limits import Limits


async def check_storage(session: AsyncSession, tenant: TenantId, defaults: Limits, *, coming: int = 0) -> None:
    """Raise ``StorageFull`` unless the tenant's storage is within its limits and has room for ``coming`` checkpoints more.

    Exact in a transaction that holds ``Counted.STORAGE``.
    """
    use = await STORAGE_USE.of(session, tenant, defaults)
    if use.room("stored_bytes") < coming or use.room("checkpoints") < coming:
        raise StorageFull(_refusal(use, coming))


def _refusal(use: Use, coming: int) -> str:
    limits, used = use.limits, use.used
    return (
        f"your storage has no room for this: checkpoints and training snapshots would take {used['stored_bytes']} of "
        f"{limits.stored_bytes} bytes and {used['checkpoints'] + coming} of {limits.checkpoints} checkpoints; delete some, or "
        "set a TTL. Training goes on"
    )
