"""Records of usage for a bill: one for each hour, meter and all that usage is told apart by, of hours that have ended.

Only whole hours are exported, and only once they change no more, so a repeated export is the same to the byte. A session
that moves to another project takes its past usage with it; nothing else of a record changes.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from typing import Final

from contracts.ids import TenantId
from store.database import Database
from tenants.prices import Meter, Tariff, tariff
from tenants.reach import Owner, tenant_of
from tenants.storage_hours import HOUR, StorageLine, storage_lines, stored_hours
from tenants.usage_costs import quantities, sums_of
from tenants.usage_hours import BucketWidth, Dimension, UsageLine, usage_lines

FINAL_AFTER: Final = timedelta(minutes=15)
"""Time after an hour's end until nobody can end an operation within it any more: far above what clocks may differ by."""
_PAGE: Final = 5_000
_MOST_PROJECTS: Final = 1_000_000
_ALL: Final = tuple(Dimension)


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """Quantity of one meter in one hour: tokens, or bytes stored throughout the hour.

    ``rate`` is the price of a million tokens or of a GB-month, None without one.
    """

    tenant: TenantId
    start: datetime
    project: str | None
    session: str | None
    run: str | None
    key: int | None
    base_model: str | None
    kind: str | None
    meter: Meter
    quantity: int
    rate: Decimal | None
    cost: Decimal | None

    @property
    def end(self) -> datetime:
        """End of the hour."""
        return self.start + HOUR

    @property
    def id(self) -> str:
        """Identity of the record: the same in every export. A receiver that knows it may leave the record out."""
        # Of tokens the project is the session's, which may change.
        project = self.project if self.meter is Meter.STORAGE else None
        parts = (
            self.tenant,
            self.start.isoformat(),
            project,
            self.session,
            self.run,
            self.key,
            self.base_model,
            self.kind,
        )
        return sha256("\x1f".join(str(part) for part in (*parts, self.meter)).encode()).hexdigest()[:32]


def final_before(now: datetime) -> datetime:
    """Return the end of the last hour whose usage does not change any more."""
    return (now - FINAL_AFTER).replace(minute=0, second=0, microsecond=0)


async def usage_records(
    database: Database, owner: Owner, *, since: datetime, before: datetime, now: datetime
) -> AsyncIterator[list[UsageRecord]]:
    """Yield the records of the hours from ``since`` on and before ``before`` that are final, in order of time, page by page.

    No connection is held while a page is used.
    """
    before = min(before, final_before(now))
    async with database.read() as session:
        prices = await tariff(session, tenant_of(owner))
        hours = await usage_lines(session, owner, since=since, before=before, by=(), limit=_hours_of(since, before))
        stored = await stored_hours(session, owner, since=since, before=before)
    tenant = tenant_of(owner)
    for hour in sorted({*stored, *(line.start for line in hours)}):
        async for page in _lines(database, owner, hour):
            yield [record for line in page for record in _of_line(tenant, line, prices)]
        async with database.read() as session:
            kept = await storage_lines(session, owner, since=hour, before=hour + HOUR, limit=_MOST_PROJECTS)
        yield [_of_storage(tenant, line, prices) for line in kept]


async def _lines(database: Database, owner: Owner, hour: datetime) -> AsyncIterator[list[UsageLine]]:
    last: UsageLine | None = None
    while True:
        async with database.read() as session:
            page = await usage_lines(
                session,
                owner,
                since=hour,
                before=hour + HOUR,
                by=_ALL,
                width=BucketWidth.HOUR,
                limit=_PAGE,
                after=last,
            )
        yield page
        if len(page) < _PAGE:
            return
        last = page[-1]


def _of_line(tenant: TenantId, line: UsageLine, prices: Tariff) -> Iterator[UsageRecord]:
    for meter, quantity in quantities(sums_of(line)).items():
        if quantity:
            yield UsageRecord(
                tenant=tenant,
                start=line.start,
                project=line.project,
                session=line.session,
                run=line.run,
                key=line.key,
                base_model=line.base_model,
                kind=line.kind,
                meter=meter,
                quantity=quantity,
                rate=prices.rate(meter, line.base_model, line.start),
                cost=prices.cost(meter, quantity, line.base_model, line.start),
            )


def _of_storage(tenant: TenantId, line: StorageLine, prices: Tariff) -> UsageRecord:
    return UsageRecord(
        tenant=tenant,
        start=line.hour,
        project=line.project,
        session=None,
        run=None,
        key=None,
        base_model=None,
        kind=None,
        meter=Meter.STORAGE,
        quantity=line.nbytes,
        rate=prices.rate(Meter.STORAGE, None, line.hour),
        cost=prices.cost(Meter.STORAGE, line.nbytes, None, line.hour),
    )


def _hours_of(since: datetime, before: datetime) -> int:
    return max(1, int((before - since) / HOUR) + 1)
