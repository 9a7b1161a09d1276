"""``GET /usage``: a tenant's usage by hour or day, told apart by what it asks for."""

import csv
import io
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from api.authentication import UsageReader
from api.endable_response import EndableResponse
from api.long_lists import long_answer
from api.request_body import off_loop
from api.security_events import note_read
from api.services import ApiServices, Services
from api.usage_records import UsageInfo
from api.wire.request_model import PlainText, UtcTime
from contracts.csv_cells import cell
from tenants.audit_actions import Action
from tenants.rights import Principal
from tenants.usage_costs import PricedLine, priced_page, priced_pages
from tenants.usage_hours import BucketWidth, Dimension
from tenants.usage_places import cursor_behind, line_before

router = APIRouter(tags=["usage"])

DEFAULT_LINES = 1000
MOST_LINES = 10_000
_BYTES_OF_A_LINE = 256


class Usage(BaseModel):
    """Lines in order of time. ``next_cursor`` is that of the next page, null on the last one.

    ``currency`` is that of the costs, null without prices. ``next_offset`` is for clients that know no cursor: pages by offset
    shift when a line comes before them.
    """

    lines: list[UsageInfo]
    currency: str | None
    next_cursor: str | None
    next_offset: int | None


@router.get("/usage", response_model=Usage)
async def read_usage(
    caller: UsageReader,
    services: Services,
    request: Request,
    since: UtcTime,
    before: UtcTime | None = None,
    group_by: Annotated[Sequence[Dimension], Query()] = (),
    bucket_width: BucketWidth = BucketWidth.HOUR,
    limit: Annotated[int | None, Query(ge=1, le=MOST_LINES)] = None,
    cursor: PlainText | None = None,
    offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    format: Literal["json", "csv"] = "json",
) -> Response:
    """Return the caller's usage of the hours that begin from ``since`` on and before ``before``, by default all up to now.

    What has been answered is in it. CSV without a ``limit`` has every line; with one, the next page's cursor is in the header
    ``x-next-cursor``. Raises ``InvalidRequest`` for a time without a zone and for a wrong cursor.
    """
    note_read(request, caller, Action.USAGE_READ)
    end = before or datetime.max.replace(tzinfo=UTC)
    after = None if cursor is None else line_before(cursor, group_by)
    if format == "csv" and limit is None and after is None and not offset:
        return _whole(services, caller, since, end, group_by, bucket_width)
    most = limit or DEFAULT_LINES
    async with services.runtime.database.survey() as session:
        page = await priced_page(
            session,
            caller.reach,
            since=since,
            before=end,
            by=group_by,
            width=bucket_width,
            limit=most,
            offset=offset,
            after=after,
        )
    following = None if page.last is None else cursor_behind(page.last, group_by)
    further = None if page.last is None or after is not None else offset + most
    size = _BYTES_OF_A_LINE * len(page.lines)
    if format == "csv":
        told_next = {"x-next-cursor": following, "x-next-offset": None if further is None else str(further)}
        headers = {name: value for name, value in told_next.items() if value is not None}
        rows = await off_loop(services, caller.tenant, size, _rows_of, page.lines)
        return Response(_header() + rows, media_type="text/csv", headers=headers)
    told = await off_loop(services, caller.tenant, size, _json_of, page.lines)
    return long_answer(lines=told, currency=page.currency, next_cursor=following, next_offset=further)


async def usage_page(
    caller: UsageReader,
    services: ApiServices,
    request: Request,
    since: datetime,
    *,
    by: Sequence[Dimension],
    width: BucketWidth,
    limit: int,
    cursor: str | None,
) -> Usage:
    """Return a page of the caller's usage from ``since`` on as records. Raises ``InvalidRequest`` for a wrong cursor."""
    note_read(request, caller, Action.USAGE_READ)
    after = None if cursor is None else line_before(cursor, by)
    async with services.runtime.database.survey() as session:
        page = await priced_page(
            session, caller.reach, since=since, before=None, by=by, width=width, limit=limit, after=after
        )
    following = None if page.last is None else cursor_behind(page.last, by)
    infos = await off_loop(services, caller.tenant, _BYTES_OF_A_LINE * len(page.lines), _infos, page.lines)
    return Usage(lines=infos, currency=page.currency, next_cursor=following, next_offset=None)


def _whole(
    services: ApiServices,
    caller: Principal,
    since: datetime,
    before: datetime,
    by: Sequence[Dimension],
    width: BucketWidth,
) -> Response:
    """Return every line as CSV, made while it is sent."""
    pages = priced_pages(services.runtime.database, caller.reach, since=since, before=before, by=by, width=width)

    async def made() -> AsyncIterator[str]:
        yield _header()
        async for page in pages:
            yield await off_loop(services, caller.tenant, _BYTES_OF_A_LINE * len(page), _rows_of, page)

    headers = {"content-disposition": 'attachment; filename="usage.csv"'}
    return EndableResponse(
        StreamingResponse(made(), media_type="text/csv", headers=headers),
        services.ended_keys.of(caller.tenant, caller.key_id),
    )


def _header() -> str:
    return ",".join(UsageInfo.model_fields) + "\r\n"


def _infos(lines: list[PricedLine]) -> list[UsageInfo]:
    return [UsageInfo.of(line) for line in lines]


def _json_of(lines: list[PricedLine]) -> orjson.Fragment:
    return orjson.Fragment(b"[" + b",".join(one.model_dump_json().encode() for one in _infos(lines)) + b"]")


def _rows_of(page: list[PricedLine]) -> str:
    return _rows(_infos(page))


def _rows(lines: list[UsageInfo]) -> str:
    """Return the lines as rows of CSV. No cell holds a user's text, but a base's name may begin with anything."""
    out = io.StringIO()
    writer = csv.writer(out)
    for line in lines:
        writer.writerow([cell(getattr(line, name)) for name in UsageInfo.model_fields])
    return out.getvalue()
