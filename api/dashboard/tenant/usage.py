"""Usage of a tenant by hour or day, with its cost, and its documents for a bill."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.dashboard.page_downloads import PageDownload
from api.dashboard.rendering import page
from api.dashboard.web_session import COUNTED, PageBillingReader, PageUsageReader
from api.services import Services
from api.weft.standing import own_standing
from api.weft.usage import read_usage, usage_page
from api.weft.usage_export import export_usage
from api.wire.request_model import PlainText
from tenants.usage_documents import Document
from tenants.usage_hours import BucketWidth, Dimension

router = APIRouter(tags=["usage"])

_LINES = 500
Days = Annotated[int, Query(ge=1, le=400)]


@router.get("/usage")
async def usage(
    caller: PageUsageReader,
    services: Services,
    request: Request,
    days: Days = 7,
    width: BucketWidth = BucketWidth.DAY,
    by: Annotated[Sequence[Dimension], Query(max_length=6)] = (),
    cursor: PlainText | None = None,
) -> Response:
    """Show the usage of the last days, and what is spent of each budget."""
    since = services.runtime.clock() - timedelta(days=days)
    found = await usage_page(caller, services, request, since, by=by, width=width, limit=_LINES, cursor=cursor)
    return page(
        request,
        "tenant/usage.html",
        usage=found,
        standing=await own_standing(caller, services),
        days=days,
        width=width,
        by=by,
        dimensions=list(Dimension),
        is_first=cursor is None,
    )


@router.get("/usage.csv", dependencies=[COUNTED])
async def usage_csv(
    caller: PageUsageReader,
    services: Services,
    request: Request,
    days: Days = 7,
    width: BucketWidth = BucketWidth.DAY,
    by: Annotated[Sequence[Dimension], Query(max_length=6)] = (),
) -> Response:
    """Return all of it as CSV, as the API gives it."""
    since = services.runtime.clock() - timedelta(days=days)
    found = await read_usage(caller, services, request, since, group_by=by, bucket_width=width, format="csv")
    return PageDownload(request, found)


@router.get("/usage/export", dependencies=[COUNTED])
async def usage_export(
    caller: PageBillingReader, services: Services, request: Request, days: Days = 30, format: Document = Document.FOCUS
) -> Response:
    """Return the usage as a document for a bill, as the API gives it."""
    since = services.runtime.clock() - timedelta(days=days)
    return PageDownload(request, await export_usage(caller, services, request, since, format=format))
