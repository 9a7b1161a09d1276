"""Holds of the keys that a request changes, and of the key that it acts as: one that has ended meanwhile makes no other.

A tenant is held before its keys, and those in order of their numbers: as who blocks or deletes it does, so that nobody waits for
a waiting one.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import ApiKey, OperatorKey, Tenant
from tenants.key_reader import check_live
from tenants.keys import find_key
from tenants.operator_keys import Operator, check_live_operator
from tenants.rights import Principal, known_mode


async def hold_keys(
    transaction: AsyncSession, caller: Principal, now: datetime, *others: int
) -> tuple[Principal, Mapping[int, ApiKey]]:
    """Return the caller as its tenant stands now, and rows by number of its key and ``others``, locked to the transaction's end.

    Raises ``Unauthenticated`` if the caller's key has ended, ``Suspended`` if its tenant is blocked, ``NotFound`` for a key that
    is not the tenant's.
    """
    tenant = await transaction.scalar(
        select(Tenant)
        .where(Tenant.id == caller.tenant)
        .with_for_update(read=True, key_share=True)
        .execution_options(populate_existing=True)
    )
    numbers = sorted({caller.key_id, *others})
    found = {number: await find_key(transaction, caller.tenant, number) for number in numbers}
    check_live(found[caller.key_id], now)
    if tenant is not None:
        mode = None if tenant.suspended_at is None else known_mode(tenant.suspend_mode)
        caller = replace(caller, suspension=mode, reason=tenant.suspend_reason)
    caller.check_not_blocked()
    return caller, found


async def hold_operator(transaction: AsyncSession, operator: Operator, now: datetime) -> None:
    """Hold the operator's key, if it acts by one, to the transaction's end. Raises ``Unauthenticated`` if it has ended."""
    if operator.key_id is None:
        return
    own = select(OperatorKey).where(OperatorKey.id == operator.key_id).with_for_update(read=True)
    check_live_operator(await transaction.scalar(own.execution_options(populate_existing=True)), now)
