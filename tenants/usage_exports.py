"""Records of usage for a bill: one for each hour, meter and all that usage is told apart by, of hours that have ended.

Only whole hours are exported, and only once they change no more, so a repeated export is the same to the byte. A session
that moves to another project takes its past usage with it; nothing else of a record changes.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.database import Database
from store.tables import Tenant
from tenants.prices import PricedQuantity, Tariff, tariff
from tenants.projects import list_projects
from tenants.reach import Owner, default_project, tenant_of
from tenants.storage_hours import HOUR, StorageLine, metered_to, storage_lines, stored_hours
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

    ``rate`` is the price of a million tokens or of a GB-month, None without one. ``list_rate`` is the service's own price, which
    differs from it for a tenant with other prices. ``currency`` is that of all prices, None in an hour before the first.
    """

    tenant: TenantId
    tenant_name: str
    start: datetime
    project: str
    project_name: str
    session: str | None
    run: str | None
    key: int | None
    base_model: str | None
    kind: str | None
    meter: PricedQuantity
    quantity: int
    rate: Decimal | None
    list_rate: Decimal | None
    cost: Decimal | None
    currency: str | None

    @property
    def end(self) -> datetime:
        """End of the hour."""
        return self.start + HOUR

    @property
    def id(self) -> str:
        """Identity of the record: the same in every export. A receiver that knows it may leave the record out."""
        # Of tokens the project is the session's, which may change.
        project = self.project if self.meter is PricedQuantity.STORAGE else None
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


@dataclass(frozen=True, slots=True)
class _Account:
    """A tenant's name, its projects' names by id, and its prices."""

    tenant: TenantId
    name: str
    projects: Mapping[str, str]
    prices: Tariff

    def record(
        self,
        meter: PricedQuantity,
        quantity: int,
        hour: datetime,
        project: str | None,
        *,
        session: str | None = None,
        run: str | None = None,
        key: int | None = None,
        base_model: str | None = None,
        kind: str | None = None,
    ) -> UsageRecord:
        """Return the record of a quantity in the hour that begins at ``hour``, with what it costs."""
        of = project or default_project(self.tenant)
        return UsageRecord(
            tenant=self.tenant,
            tenant_name=self.name,
            start=hour,
            project=of,
            project_name=self.projects.get(of, of),
            session=session,
            run=run,
            key=key,
            base_model=base_model,
            kind=kind,
            meter=meter,
            quantity=quantity,
            rate=self.prices.rate(meter, base_model, hour),
            list_rate=self.prices.list_rate(meter, base_model, hour),
            cost=self.prices.cost(meter, quantity, base_model, hour),
            currency=self.prices.currency_in(hour),
        )


async def final_before(session: AsyncSession, now: datetime) -> datetime:
    """Return the end of the last hour whose usage does not change any more: of tokens by its age, of storage by its reading."""
    of_tokens = (now - FINAL_AFTER).replace(minute=0, second=0, microsecond=0)
    return min(of_tokens, await metered_to(session, now))


async def usage_records(
    database: Database, owner: Owner, *, since: datetime, before: datetime
) -> AsyncIterator[list[UsageRecord]]:
    """Yield the records of the hours from ``since`` on and before ``before``, in order of time, page by page.

    ``before``: at most what ``final_before`` returns, so that a repeated export is the same. No connection is held while a
    page is used.
    """
    async with database.survey() as session:
        account = await _account(session, tenant_of(owner))
        hours = await usage_lines(session, owner, since=since, before=before, by=(), limit=_hours_of(since, before))
        stored = await stored_hours(session, owner, since=since, before=before)
    for hour in sorted({*stored, *(line.start for line in hours)}):
        async for page in _lines(database, owner, hour):
            yield [record for line in page for record in _of_line(account, line)]
        async with database.survey() as session:
            kept = await storage_lines(session, owner, since=hour, before=hour + HOUR, limit=_MOST_PROJECTS)
        yield [_of_storage(account, line) for line in kept]


async def _account(session: AsyncSession, tenant: TenantId) -> _Account:
    # A key of some projects reads records of no others, whose names are not looked up.
    projects = {one.id: one.name for one in await list_projects(session, tenant)}
    name = await session.scalar(select(Tenant.name).where(Tenant.id == tenant))
    return _Account(tenant, name or tenant, projects, await tariff(session, tenant))


async def _lines(database: Database, owner: Owner, hour: datetime) -> AsyncIterator[list[UsageLine]]:
    last: UsageLine | None = None
    while True:
        async with database.survey() as session:
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


def _of_line(account: _Account, line: UsageLine) -> Iterator[UsageRecord]:
    for meter, quantity in quantities(sums_of(line)).items():
        if quantity:
            yield account.record(
                meter,
                quantity,
                line.start,
                line.project,
                session=line.session,
                run=line.run,
                key=line.key,
                base_model=line.base_model,
                kind=line.kind,
            )


def _of_storage(account: _Account, line: StorageLine) -> UsageRecord:
    return account.record(PricedQuantity.STORAGE, line.nbytes, line.hour, line.project)


def _hours_of(since: datetime, before: datetime) -> int:
    return max(1, int((before - since) / HOUR) + 1)
