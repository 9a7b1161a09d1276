"""Removal of deleted tenants: each visit of one does a bounded part, and a tenant whose visit fails holds up no other."""

import asyncio
import logging

from contracts.errors import Cancelled
from contracts.ids import TenantId
from ledger.cancellation import OfTenant
from ledger.runtime import Runtime
from store.database_clock import database_now
from tenants.deletion import end_tenant, has_remains, lock_due, next_due, scrub_tenant
from tenants.weight_jobs import parts_folder
from workers.housekeeping.step import LARGE, Batch

log = logging.getLogger(__name__)

_UNFINISHED = "+"
"""Mark of a place: on the way to it a tenant was left with rows that the next visit can go on with."""


async def remove_next_tenant(runtime: Runtime, place: str | None) -> Batch:
    """Visit the due tenant after ``place``. Behind the last one, begin again if any visit was not the last of its tenant."""
    after = (place or "").removeprefix(_UNFINISHED)
    is_unfinished = (place or "").startswith(_UNFINISHED)
    async with runtime.database.read() as session:
        tenant = await next_due(session, await database_now(session, runtime.clock), after=after)
    if tenant is None:
        return Batch(0, "" if is_unfinished else None)
    (done,) = await asyncio.gather(remove_part(runtime, tenant), return_exceptions=True)
    if isinstance(done, BaseException):
        log.error("the removal of tenant %s failed; it is tried again", tenant, exc_info=done)
        done = 0
    return Batch(done, f"{_UNFINISHED if is_unfinished or done else ''}{tenant}")


async def remove_part(runtime: Runtime, tenant: TenantId) -> int:
    """End what the tenant has, and scrub some of it if no file is left. Return how many rows: 0 if there is none for now.

    Other steps remove the files. A tenant whose deletion was taken back meanwhile is left alone.
    """
    async with runtime.database.write() as transaction:
        now = await database_now(transaction, runtime.clock)
        if not await lock_due(transaction, tenant, now):
            return 0
        # First: whatever completes operations locks runs before checkpoints, too.
        await runtime.ledger.cancel(transaction, OfTenant(tenant), Cancelled("cancelled: this tenant was deleted"))
        ended = await end_tenant(transaction, tenant, now, most=LARGE)
        if ended or await has_remains(transaction, tenant, now):
            return ended
        # No row names it, and its uploads have ended with its keys.
        await asyncio.to_thread(runtime.data_folder.remove, parts_folder(tenant))
        return await scrub_tenant(transaction, tenant, now, most=LARGE)
