"""Times ahead that a clock has left which was ahead itself, and was set back.

The clock is the database's host's in a cluster, that of the process in ``weft serve``. Left alone, rates would hold work, leases
would keep dead processes alive, and webhooks and the meter of storage would rest for as long as the clock was ahead.

A time to come is afterwards as far ahead as it was by the clock that was ahead. Times that tenants have asked for, such as those
of pauses, are not among them, nor are those at which something happened.
"""

import logging
from datetime import datetime, timedelta
from typing import cast

from sqlalchemy import Table, case, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Rate, RateLineRow, ServicePresence, Webhook, WebhookEvent, WeightJob, WorkerProcess

log = logging.getLogger(__name__)

SMALLEST = timedelta(minutes=1)
"""Smallest step back that counts: processes that note the presence at the same moment differ by less."""


async def mend_times_ahead(transaction: AsyncSession, *, was_at: datetime, now: datetime) -> None:
    """Have what is to come be as far ahead of ``now`` as it was of ``was_at``, which the clock has told before."""
    log.warning("the clock was set back by %s; what is to come is reckoned from now on", was_at - now)
    before, at = was_at.timestamp(), now.timestamp()
    for model in (Rate, RateLineRow):
        table = cast(Table, model.__table__)
        left = case((table.c.tat > before, table.c.tat - before), else_=0.0)
        await transaction.execute(update(table).where(table.c.tat > at).values(tat=at + left))
    for lease in (WorkerProcess.expires_at, WeightJob.taken_until):
        owner = lease.class_
        for held in await transaction.scalars(select(owner).where(lease > now)):
            until: datetime = getattr(held, lease.key)
            setattr(held, lease.key, now + max(until - was_at, timedelta()))
    for waiting in (Webhook.rests_until, WebhookEvent.due_at):
        await transaction.execute(update(waiting.class_).where(waiting > now).values({waiting.key: now}))
    hour = now.replace(minute=0, second=0, microsecond=0)
    metered = ServicePresence.storage_metered_to
    await transaction.execute(update(ServicePresence).where(metered > hour).values(storage_metered_to=hour))
    await transaction.flush()
