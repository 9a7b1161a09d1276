"""Looks of operators at a tenant's pages: a viewer's key of a quarter of an hour, whose secret nobody is told.

A look is a login code of such a key. What the browser may see is what any viewer of the tenant may, and it changes nothing. The
tenant finds the look in its audit log and the key in its list, and may revoke it.
"""

from datetime import datetime, timedelta

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.clock import Clock
from store.tables import ApiKey
from tenants.keys import create_key, forget_ended_keys
from tenants.login_codes import make_code
from tenants.rights import KeyRights, Role

LOOK = timedelta(minutes=15)
"""Length of a look."""
_KEPT = timedelta(days=1)
"""Time for which the key of a look that is over stays in the tenant's list. The audit log keeps the look itself."""


async def begin_look(transaction: AsyncSession, tenant: TenantId, *, operator: str, reason: str, clock: Clock) -> str:
    """Return a code that logs one browser in as a viewer of the tenant, once, within a minute.

    Nothing that the tenant reads has the operator's name.
    """
    now = clock()
    note = "look of an operator" + (f": {reason}" if reason else "")
    rights = KeyRights(Role.VIEWER, expires_at=now + LOOK)
    key = await create_key(transaction, tenant=tenant, note=note, clock=clock, rights=rights)
    await transaction.execute(update(ApiKey).where(ApiKey.id == key.id).values(operator=operator))
    return await make_code(transaction, key.id, now=now)


async def forget_looks(transaction: AsyncSession, *, now: datetime, most: int) -> int:
    """Delete at most ``most`` keys of looks that were over a day ago, and no browser has; return how many."""
    return await forget_ended_keys(transaction, now - _KEPT, ApiKey.operator.is_not(None), most=most)
