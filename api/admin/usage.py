"""Usage for operators: of all tenants by day, of one by the hour, counted again, and as a document for a bill."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import date, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict

from api.admin.acts import note_operators_read, record_operator
from api.admin.bodies import Limit, Listed, PathId, QueryText, listed
from api.admin.services import Admin, Caller
from api.admin.tenants import find_row
from api.usage_records import UsageInfo
from api.wire.request_model import NO_NUL, UtcDay, UtcTime
from contracts.ids import TenantId
from tenants.audit_actions import Action
from tenants.tenant_names import find_tenant
from tenants.usage import DayLine, usage
from tenants.usage_costs import priced_page
from tenants.usage_documents import FINAL_BEFORE, MEDIA_TYPES, Document, header, lines
from tenants.usage_exports import final_before, usage_records
from tenants.usage_hours import BucketWidth, Dimension
from tenants.usage_places import cursor_behind, line_before
from tenants.usage_verification import verify_day

router = APIRouter(tags=["usage"])

_MOST_DAYS = 3660
AfterUsage = Annotated[str | None, Query(pattern=NO_NUL, max_length=5000)]
"""The ``next`` of the page before. A base model's name is part of it."""


class UsageDayBody(BaseModel):
    """A tenant's usage on one day (UTC): operations done, and their tokens."""

    tenant: str
    day: date
    base_model: str
    kind: str
    operations: int
    tokens: int


@router.get("/usage")
async def list_usage(
    caller: Caller,
    admin: Admin,
    request: Request,
    days: Annotated[int, Query(ge=1, le=_MOST_DAYS)] = 30,
    tenant: QueryText = None,
    after: AfterUsage = None,
    limit: Limit = 50,
) -> Listed[UsageDayBody]:
    """List usage by tenant, day, base model and kind, of the last ``days`` up to today; ``tenant`` is a name.

    Raises ``InvalidRequest`` for an ``after`` that is none, ``NotFound`` for an unknown tenant.
    """
    since = admin.runtime.clock().date() - timedelta(days=days - 1)
    last = None if after is None else DayLine.before(after)
    async with admin.runtime.database.survey() as session:
        owner = None if tenant is None else await find_tenant(session, name=tenant)
        found = await usage(session, since=since, tenant=tenant, after=last, most=limit + 1)
    if after is None:
        await note_operators_read(admin, request, caller, Action.USAGE_READ, tenant=owner)
    bodies = [UsageDayBody.model_validate(line, from_attributes=True) for line in found]
    return listed(bodies, limit, [line.cursor for line in found])


class UsageMismatch(BaseModel):
    """A sum of a tenant that differs. ``table`` holds ``told``; ``counted`` is what the finer rows come to."""

    model_config = ConfigDict(from_attributes=True)

    tenant: str
    table: str
    name: str
    told: int
    counted: int


class UsageVerification(BaseModel):
    """Usage of one day (UTC), counted again; hours from ``since`` on from their operations, which were all kept.

    ``has_all_hours``: no hour of the day has expired, so that the day was counted again from its hours.
    """

    day: date
    since: datetime
    tenants: int
    operations: int
    has_all_hours: bool
    mismatches: list[UsageMismatch]


@router.get("/usage/verification")
async def verify_usage(caller: Caller, admin: Admin, day: UtcDay) -> UsageVerification:
    """Count a day's usage again: days from their hours, and hours from the operations that are kept. Takes a while."""
    del caller
    now, settings = await admin.now(), admin.runtime.settings
    kept_since, hours_since = now - settings.retention_operations, now - settings.retention_usage_hours
    async with admin.runtime.database.survey() as session:
        found = await verify_day(session, day, kept_since=kept_since, hours_since=hours_since)
    return UsageVerification.model_validate(found, from_attributes=True)


class TenantUsageBody(UsageInfo):
    """A line of a tenant's usage. ``currency`` is that of the cost, null without prices."""

    currency: str | None


@router.get("/tenants/{tenant_id}/usage")
async def read_tenants_usage(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    since: UtcTime,
    before: UtcTime | None = None,
    group_by: Annotated[Sequence[Dimension], Query()] = (),
    bucket_width: BucketWidth = BucketWidth.HOUR,
    after: AfterUsage = None,
    limit: Limit = 50,
) -> Listed[TenantUsageBody]:
    """List a tenant's usage of the hours from ``since`` on and before ``before``, by default all up to now.

    What has been answered is in it. Raises ``NotFound``, and ``InvalidRequest`` for an ``after`` that is none.
    """
    behind = None if after is None else line_before(after, group_by)
    async with admin.runtime.database.survey() as session:
        owner = TenantId((await find_row(session, tenant_id)).id)
        page = await priced_page(
            session, owner, since=since, before=before, by=group_by, width=bucket_width, limit=limit, after=behind
        )
    if after is None:
        await note_operators_read(admin, request, caller, Action.USAGE_READ, tenant=owner)
    further = None if page.last is None else cursor_behind(page.last, group_by)
    bodies = [TenantUsageBody(**UsageInfo.of(one).model_dump(), currency=page.currency) for one in page.lines]
    return Listed(items=bodies, next=further)


@router.get("/tenants/{tenant_id}/usage/export", response_class=StreamingResponse)
async def export_tenants_usage(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    since: UtcTime,
    before: UtcTime | None = None,
    format: Document = Document.FOCUS,
) -> StreamingResponse:
    """Return a tenant's usage of the hours from ``since`` on and before ``before`` for a bill: a record for each meter.

    Hours that may still change are left out; the header ``weft-final-before`` has the first of them. ``focus`` is FOCUS 1.2
    as CSV, ``cloudevents`` a CloudEvent a line. Raises ``NotFound``.
    """
    database, now = admin.runtime.database, await admin.now()
    end = now if before is None else before
    async with database.write() as transaction:
        owner = TenantId((await find_row(transaction, tenant_id)).id)
        told = {"since": since, "before": end, "format": format}
        await record_operator(
            transaction, admin, request, caller, Action.USAGE_READ, "usage export", tenant=owner, after=told
        )

        final = await final_before(transaction, now)

    async def made() -> AsyncIterator[str]:
        yield header(format)
        async for page in usage_records(database, owner, since=since, before=min(end, final)):
            yield await asyncio.to_thread(lines, format, page)

    return StreamingResponse(made(), media_type=MEDIA_TYPES[format], headers={FINAL_BEFORE: final.isoformat()})
